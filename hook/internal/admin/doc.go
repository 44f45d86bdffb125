// Package admin implements both sides of the protocol of a supervisor's administration socket.
package admin
