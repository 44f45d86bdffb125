// Package staging accounts for the staging memory of the relays of a host.
package staging
