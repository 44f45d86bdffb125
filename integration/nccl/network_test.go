package main

import (
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// The two namespaces of hosts reach each other over the cable.
func TestHostsReachEachOther(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes network namespaces")
	}
	n, err := newHosts(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.close(); err != nil {
			t.Error(err)
		}
	})
	in := func(host int, f func() error) {
		t.Helper()
		namespace, err := os.Open(n.files[host])
		if err != nil {
			t.Fatal(err)
		}
		defer namespace.Close()
		if err := within(func() error {
			if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
			return f()
		}); err != nil {
			t.Fatal(err)
		}
	}
	var l net.Listener
	in(1, func() (err error) {
		l, err = net.Listen("tcp", "10.214.77.2:0")
		return err
	})
	defer l.Close()
	in(0, func() error {
		c, err := net.Dial("tcp", l.Addr().String())
		if err == nil {
			c.Close()
		}
		return err
	})
}
