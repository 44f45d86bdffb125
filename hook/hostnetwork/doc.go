// Package hostnetwork finds the addresses, rails and secrets by which a relay of this host
// reaches other hosts.
package hostnetwork
