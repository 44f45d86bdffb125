// Package control lists, inspects, drains, stops and resumes the relays of a host, for the
// commands of an administrator.
package control
