package nixl_test

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cuda/sim"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/softhost"
)

// The tests' host: GPUs 0 and 1 are clients, 2 and 3 servers beside NICs.
var devices = func() (list []sim.Device) {
	for i := range 4 {
		list = append(list, sim.Device{
			Index: i, Minor: i, Memory: 16 << 30, Name: "NVIDIA H100 80GB HBM3",
			UUID:  fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%x", i+1),
			BusID: fmt.Sprintf("0000:%02x:00.0", i+0x10),
		})
	}
	return list
}()

// configVariable has this program be a relay of a test, with this configuration.
const configVariable = "PEERLANE_TEST_CONFIG"

func TestMain(m *testing.M) {
	logrus.SetLevel(logrus.ErrorLevel)
	if text := os.Getenv(configVariable); text != "" {
		if err := beRelay(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	dir, err := os.MkdirTemp("", "peerlane-nixl-test-")
	if err == nil {
		err = sim.Use(filepath.Join(dir, "host"), devices)
	}
	if err == nil {
		err = softhost.Use(filepath.Join(dir, "rdma"), "nic0", "nic1")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "preparing the simulator:", err)
		os.Exit(1)
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// host is a directory for the sockets of relay processes.
type host struct {
	*testing.T
	dir, route string
	limits     launch.Limits // of the relays that start from now on
}

func newHost(t *testing.T, route string) *host {
	t.Helper()
	dir, err := os.MkdirTemp("", "pl") // short, for the length of a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return &host{T: t, dir: dir, route: route}
}

// lane is a relay with the lane of a GPU over a NIC, with the socket for clients.
type lane struct {
	*exec.Cmd
	socket, uuid string
	stderr       *bytes.Buffer
}

func (l *lane) kill() {
	l.Process.Kill()
	l.Wait()
}

// lane starts the relay of container i.
func (h *host) lane(i int) *lane {
	h.Helper()
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		h.Fatal(err)
	}
	gpu := func(i int) launch.GPU {
		return launch.GPU{UUID: devices[i].UUID, BusID: devices[i].BusID, Index: i}
	}
	nic := fmt.Sprintf("nic%d", i)
	name := string(rune('a' + i))
	c := launch.Config{
		Generation: hex.EncodeToString(id[:]), Container: name, Route: h.route, Transport: launch.TransportAuto,
		Slots: 4, SlotBytes: 1 << 20, Peers: h.dir, Limits: h.limits,
		Lanes: []launch.Lane{{
			GPU: gpu(i), Role: "far", Relay: true, Servers: []launch.GPU{gpu(2 + i)}, NICs: []string{nic},
			NIC: &launch.NIC{Name: nic, GUID: 0xe040a10003c288a0, Mbps: 200000, Port: 2}, PeerMbps: 2966400,
		}},
	}
	if h.route != launch.RouteDirect {
		softhost.Configure(&c)
	}
	text, err := json.Marshal(c)
	if err != nil {
		h.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		h.Fatal(err)
	}
	l := &lane{Cmd: exec.Command(exe), socket: filepath.Join(h.dir, name), uuid: devices[i].UUID, stderr: &bytes.Buffer{}}
	l.Env = append(os.Environ(), configVariable+"="+string(text))
	l.Stderr = l.stderr
	out, err := l.StdoutPipe()
	if err != nil {
		h.Fatal(err)
	}
	if err := l.Start(); err != nil {
		h.Fatal(err)
	}
	h.Cleanup(l.kill)
	said := make([]byte, 6)
	if _, err := out.Read(said); err != nil || string(said) != "ready\n" {
		h.Fatalf("the relay says %q, %v: %s", said, err, l.stderr)
	}
	return l
}

// beRelay serves until the kill.
func beRelay(text string) error {
	var c launch.Config
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	listen := func(name string) (*net.UnixListener, error) {
		path := filepath.Join(c.Peers, name)
		_ = os.Remove(path) // of a killed relay
		return net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	}
	clients, err := listen(c.Container)
	if err != nil {
		return err
	}
	peers, err := listen(c.Generation + ".sock")
	if err != nil {
		return err
	}
	r, err := relay.New(clients, peers, -1)
	if err == nil {
		err = softhost.Join(r.Secrets)
	}
	if err == nil {
		err = r.Configure(c)
	}
	if err != nil {
		return err
	}
	// No process outlives the test, whose end closes this pipe.
	fmt.Println("ready")
	time.AfterFunc(10*time.Minute, func() { os.Exit(1) })
	return r.Run()
}
