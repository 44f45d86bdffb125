// Package hostnetwork finds the addresses, rails and secrets with which a relay of this host
// connects to other hosts.
package hostnetwork
