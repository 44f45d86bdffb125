// Package handover passes a generation from the hook to a supervisor: through inherited
// descriptors after a fork, or through messages to a systemd service.
package handover
