// Package admin is the protocol of a supervisor's administration socket, both sides.
package admin
