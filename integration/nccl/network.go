package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// network is a bridge on the host, and a network namespace for each rank, whose eth0 is attached to
// the bridge.
type network struct {
	bridge string
	files  []string // files that name the namespaces
}

func (n *network) address(rank int) string { return fmt.Sprintf("10.213.77.%d", rank+1) }

// newNetwork creates the bridge and the namespaces. Files in dir name the namespaces.
func newNetwork(dir string, ranks int) (n *network, err error) {
	n = &network{bridge: fmt.Sprintf("pl%d", os.Getpid())}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	attributes := netlink.NewLinkAttrs()
	attributes.Name = n.bridge
	bridge := &netlink.Bridge{LinkAttrs: attributes}
	if err := netlink.LinkAdd(bridge); err != nil {
		return n, fmt.Errorf("create a bridge: %w", err)
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		return n, err
	}
	for i := range ranks {
		file := filepath.Join(dir, fmt.Sprintf("net-%d", i))
		if err := newNamespace(file); err != nil {
			return n, fmt.Errorf("a network namespace: %w", err)
		}
		n.files = append(n.files, file)
		if err := n.join(bridge, i); err != nil {
			return n, fmt.Errorf("rank %d's link to the bridge: %w", i, err)
		}
	}
	return n, nil
}

// hosts are the network namespaces of two relays, as if of two hosts. A veth pair joins the
// namespaces; both ends have the name cable.
type hosts struct {
	files [2]string // files that name the namespaces
}

const cable = "plnet0"

// newHosts creates the namespaces. Files in dir name the namespaces.
func newHosts(dir string) (n *hosts, err error) {
	n = &hosts{}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close())
		}
	}()
	var handles [2]*os.File
	for i := range n.files {
		file := filepath.Join(dir, fmt.Sprintf("host-%d", i))
		if err := newNamespace(file); err != nil {
			return n, fmt.Errorf("a network namespace: %w", err)
		}
		n.files[i] = file
		if handles[i], err = os.Open(file); err != nil {
			return n, err
		}
		defer handles[i].Close()
	}
	err = within(func() error {
		if err := unix.Setns(int(handles[0].Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		attributes := netlink.NewLinkAttrs()
		attributes.Name, attributes.MTU = cable, 9000
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attributes, PeerName: cable, PeerMTU: 9000,
			PeerNamespace: netlink.NsFd(handles[1].Fd())})
	})
	if err != nil {
		return n, fmt.Errorf("the cable between two hosts: %w", err)
	}
	for i := range handles {
		err := within(func() error {
			if err := unix.Setns(int(handles[i].Fd()), unix.CLONE_NEWNET); err != nil {
				return err
			}
			address := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 214, 77, byte(i+1)), Mask: net.CIDRMask(24, 32)}}
			return up(cable, address)
		})
		if err != nil {
			return n, fmt.Errorf("the address of host %d: %w", i, err)
		}
	}
	return n, nil
}

// up sets the loopback and an interface, which gets an address, up.
func up(name string, address *netlink.Addr) error {
	for _, n := range []string{"lo", name} {
		link, err := netlink.LinkByName(n)
		if err == nil && n == name {
			err = netlink.AddrAdd(link, address)
		}
		if err == nil {
			err = netlink.LinkSetUp(link)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (n *hosts) close() error {
	var err error
	for _, file := range n.files {
		if file != "" {
			err = errors.Join(err, unix.Unmount(file, unix.MNT_DETACH))
		}
	}
	return err
}

// within runs f on a thread that is not reused.
func within(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- f()
	}()
	return <-done
}

func newNamespace(file string) error {
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		return err
	}
	return within(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", file, "", unix.MS_BIND, "")
	})
}

// join creates the eth0 of a rank's namespace.
func (n *network) join(bridge *netlink.Bridge, rank int) error {
	namespace, err := os.Open(n.files[rank])
	if err != nil {
		return err
	}
	defer namespace.Close()
	attributes := netlink.NewLinkAttrs()
	attributes.Name, attributes.MasterIndex = fmt.Sprintf("%sv%d", n.bridge, rank), bridge.Attrs().Index
	peer := fmt.Sprintf("%sp%d", n.bridge, rank)
	pair := &netlink.Veth{LinkAttrs: attributes, PeerName: peer}
	if err := netlink.LinkAdd(pair); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(pair); err != nil {
		return err
	}
	inner, err := netlink.LinkByName(peer)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetNsFd(inner, int(namespace.Fd())); err != nil {
		return err
	}
	return within(func() error {
		if err := unix.Setns(int(namespace.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		if err := netlink.LinkSetName(inner, "eth0"); err != nil {
			return err
		}
		address := &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(n.address(rank)), Mask: net.CIDRMask(24, 32)}}
		return up("eth0", address)
	})
}

func (n *network) close() error {
	var err error
	for _, file := range n.files {
		err = errors.Join(err, unix.Unmount(file, unix.MNT_DETACH))
	}
	bridge, missing := netlink.LinkByName(n.bridge)
	if missing == nil {
		err = errors.Join(err, netlink.LinkDel(bridge))
	}
	return err
}
