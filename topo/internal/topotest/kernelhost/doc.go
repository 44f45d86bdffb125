// Package kernelhost has a host for tests that is read from a tree of sysfs.
package kernelhost
