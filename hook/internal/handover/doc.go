// Package handover passes a generation from the hook to a supervisor: by inherited descriptors
// after a fork, or by messages to a service of systemd.
package handover
