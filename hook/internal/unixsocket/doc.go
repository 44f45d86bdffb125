// Package unixsocket listens on and connects to SOCK_SEQPACKET sockets by paths of any length.
package unixsocket
