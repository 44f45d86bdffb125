package sandbox

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/relay/network/address"
)

// The report of an older kernel names the missing parts, as for a kernel without Landlock.
func TestOlderLandlockReportsMissingParts(t *testing.T) {
	for abi := 1; abi < 8; abi++ {
		for _, ports := range []address.Ports{{}, {First: 20000, Last: 20999}} {
			var r Report
			olderLacks(abi, ports, r.lacks)
			lacks := strings.Join(r.Missing, "\n")
			if reported := strings.Contains(lacks, "abstract Unix sockets"); reported != (abi < 6) {
				t.Errorf("version %d lacks %q", abi, r.Missing)
			}
			if reported := strings.Contains(lacks, "TCP on ports 20000-20999 alone"); reported != (abi < 4 && ports.First != 0) {
				t.Errorf("version %d lacks %q of ports %v", abi, r.Missing, ports)
			}
			if len(r.Missing) > 2 || abi >= 6 && len(r.Missing) > 0 {
				t.Errorf("version %d lacks %q", abi, r.Missing)
			}
		}
		if _, network, scopes := handled(abi); (network != 0) != (abi >= 4) || (scopes != 0) != (abi >= 6) {
			t.Errorf("version %d handles %#x of the network and scopes %#x", abi, network, scopes)
		}
	}
}

// A relay on the network can listen on and connect to the ports of relays, and no others.
func TestLandlockAllowsListedPortsOnly(t *testing.T) {
	if os.Getenv("PEERLANE_TEST_PORTS") != "" {
		tryPorts()
	}
	version, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	if errno != 0 || version < 4 {
		t.Skipf("this kernel's Landlock knows no TCP: version %d, %v", version, errno)
	}
	c := exec.Command("/proc/self/exe", "-test.run", "^TestLandlockAllowsListedPortsOnly$")
	c.Env = append(os.Environ(), "PEERLANE_TEST_PORTS=1")
	out, err := c.CombinedOutput()
	if want := "listen 20000: true\nconnect 20000: true\nlisten 19999: false\nconnect 19999: false\n"; err != nil ||
		string(out) != want {
		t.Errorf("%v: %s; want %s", err, out, want)
	}
}

// tryPorts ends this process.
func tryPorts() {
	runtime.LockOSThread()
	check := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	rules, err := landlockRules(view{}, false, address.Ports{First: 20000, Last: 20001}, func(string, error) {})
	check(err)
	check(unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
	if _, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(rules.fd), 0, 0); errno != 0 {
		check(errno)
	}
	for _, port := range []int{20000, 19999} {
		for _, attempt := range []struct {
			what string
			how  func(int, unix.Sockaddr) error
		}{{"listen", unix.Bind}, {"connect", unix.Connect}} {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			check(err)
			// Another process may use the port: that error is not Landlock's.
			err = attempt.how(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}})
			fmt.Printf("%s %d: %t\n", attempt.what, port, err != unix.EACCES)
			unix.Close(fd)
		}
	}
	os.Exit(0)
}
