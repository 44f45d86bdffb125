// Package staging accounts for the staging memory of all relays of a host.
package staging
