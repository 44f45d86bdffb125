// Package staging keeps the account of the staging memory that the relays of a host have.
package staging
