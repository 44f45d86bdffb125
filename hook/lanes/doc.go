// Package lanes finds the lanes that a container requests in the host's plan, and checks that
// the plan still fits the host.
package lanes
