// Package hostconfig reads the administrator's configuration for the hook, which runs as root: it
// refuses a file that another user could have written, and uses the last good copy of a file with
// a fault.
package hostconfig
