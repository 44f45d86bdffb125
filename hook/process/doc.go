// Package process identifies processes by number, start time and boot, and waits for their end
// by pidfds.
package process
