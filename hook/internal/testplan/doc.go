// Package testplan provides a plan for tests.
package testplan
