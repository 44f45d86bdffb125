// Package journal writes messages about containers to the host's journal or syslog.
package journal
