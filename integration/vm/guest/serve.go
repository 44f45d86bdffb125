package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/integration/vm/control"
	"github.com/peerlane/peerlane/integration/vm/wiring"
)

// serve is the agent.
func serve() error {
	if err := configureNetwork(); err != nil {
		return err
	}
	ready, err := about()
	if err != nil {
		return err
	}
	if address, ok := wiring.Control(); ok {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return err
		}
		go servePeer(listener, ready)
	}
	port, err := wiring.OpenPort(wiring.ControlPort)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "guest: serving, %v after boot\n", ready.Uptime)
	return control.Serve(port, ready)
}

func servePeer(listener net.Listener, ready control.Ready) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			fmt.Fprintf(os.Stderr, "guest: no more connections of the other guest: %v\n", err)
			return
		}
		go func() {
			defer conn.Close()
			if err := control.Serve(conn, ready); err != nil {
				fmt.Fprintf(os.Stderr, "guest: serving the other guest: %v\n", err)
			}
		}()
	}
}

func about() (control.Ready, error) {
	var system unix.Utsname
	if err := unix.Uname(&system); err != nil {
		return control.Ready{}, err
	}
	text, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return control.Ready{}, err
	}
	seconds, err := strconv.ParseFloat(strings.Fields(string(text))[0], 64)
	return control.Ready{
		Uptime: time.Duration(seconds * float64(time.Second)),
		Kernel: unix.ByteSliceToString(system.Release[:]),
	}, err
}

// configureNetwork sets the name and the address of each network card by hardware address.
func configureNetwork() error {
	runtime.LockOSThread() // a netlink socket uses the namespace of its thread
	defer runtime.UnlockOSThread()
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list network links: %w", err)
	}
	for _, link := range links {
		card, ok := wiring.CardOf(link.Attrs().HardwareAddr)
		if !ok {
			if link.Attrs().Name != "lo" {
				continue
			}
			if err := netlink.LinkSetUp(link); err != nil {
				return fmt.Errorf("lo: %w", err)
			}
			continue
		}
		if err := configureCard(link, card); err != nil {
			return fmt.Errorf("network card %s: %w", card.Name, err)
		}
	}
	return nil
}

func configureCard(link netlink.Link, card wiring.Card) error {
	if err := netlink.LinkSetDown(link); err != nil {
		return err
	}
	if err := netlink.LinkSetName(link, card.Name); err != nil {
		return err
	}
	address, err := netlink.ParseAddr(card.Address)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, address); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	// Both rails may reach both addresses: answer ARP only for the address of the card.
	for name, value := range map[string]string{"arp_ignore": "1", "arp_announce": "2"} {
		file := filepath.Join("/proc/sys/net/ipv4/conf", card.Name, name)
		if err := os.WriteFile(file, []byte(value), 0); err != nil {
			return err
		}
	}
	return nil
}
