// Package topotest has hosts, trees of sysfs and files for tests.
package topotest
