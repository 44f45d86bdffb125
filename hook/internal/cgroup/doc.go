// Package cgroup makes, limits and removes the control group of a supervisor and its relay, and
// reads the limits and counters of control groups.
package cgroup
