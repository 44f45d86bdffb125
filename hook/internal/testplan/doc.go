// Package testplan is a plan for tests.
package testplan
