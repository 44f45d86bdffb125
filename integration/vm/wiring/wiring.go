// Package wiring defines the interface between a virtual machine's host and its guest: network
// cards by hardware address, and virtio-serial ports.
package wiring

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/peerlane/peerlane/integration/vm/control"
)

// Cards are the names of the network cards. The rails carry RDMA devices; the control card joins
// two guests without loss and delay.
var Cards = []string{"rail0", "rail1", "control"}

// Guests is the number of guests in a network.
const Guests = 2

// Names of the virtio-serial ports.
const (
	ControlPort = "peerlane.control" // package control, the agent serves
	HostPort    = "peerlane.host"    // a test sends requests to the host: Request
)

// Request is a request of a guest to its host: a JSON line with a JSON line as answer.
type Request struct {
	// Card is the card whose cable is plugged or unplugged.
	Card    string `json:"card,omitempty"`
	Plugged bool   `json:"plugged,omitempty"`
	// Other is the action for the other guest's processors: Stop or Continue.
	Other string `json:"other,omitempty"`
}

// Values of Request.Other, the names of commands of QEMU's monitor.
const (
	Stop     = "stop"
	Continue = "cont"
)

// Answer is "" or an error.
type Answer struct {
	Failed string `json:"failed"`
}

// MAC is a card's hardware address in guest 0 or 1.
func MAC(card, guest int) string { return fmt.Sprintf("52:54:00:70:%02x:%02x", card, guest+1) }

// Address is a card's IPv4 address in guest 0 or 1.
func Address(card, guest int) string { return fmt.Sprintf("10.77.%d.%d", card, guest+1) }

// Card is a network card of a guest.
type Card struct {
	Name    string
	Address string // with the prefix's length
}

// CardOf finds the card of a hardware address.
func CardOf(address net.HardwareAddr) (Card, bool) {
	for guest := range Guests {
		for i, name := range Cards {
			if address.String() == MAC(i, guest) {
				return Card{Name: name, Address: Address(i, guest) + "/24"}, true
			}
		}
	}
	return Card{}, false
}

// Guest returns the number of this guest; ok is false in a single guest, or outside a guest.
func Guest() (guest int, ok bool) {
	control, err := net.InterfaceByName(Cards[len(Cards)-1])
	if err != nil {
		return 0, false
	}
	for guest := range Guests {
		if control.HardwareAddr.String() == MAC(len(Cards)-1, guest) {
			return guest, true
		}
	}
	return 0, false
}

// Control returns the address at which this guest's agent serves the other guest.
func Control() (string, bool) {
	guest, ok := Guest()
	return Agent(guest), ok
}

// Agent is the address of a guest's agent.
func Agent(guest int) string {
	return fmt.Sprintf("%s:%d", Address(len(Cards)-1, guest), control.Port)
}

// OpenPort opens a virtio-serial port of this guest by name.
func OpenPort(name string) (*os.File, error) {
	// udev's links in /dev/virtio-ports need udev.
	names, err := filepath.Glob("/sys/class/virtio-ports/*/name")
	if err != nil {
		return nil, err
	}
	for _, file := range names {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if strings.TrimSpace(string(text)) == name {
			return os.OpenFile(filepath.Join("/dev", filepath.Base(filepath.Dir(file))), os.O_RDWR, 0)
		}
	}
	return nil, errors.New("this machine has no virtio-serial port " + name)
}
