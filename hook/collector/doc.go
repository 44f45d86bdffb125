// Package collector removes the generations of containers that have ended, after their
// supervisor was killed.
package collector
