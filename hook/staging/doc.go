// Package staging keeps the account of the staging memory of all relays of a host.
package staging
