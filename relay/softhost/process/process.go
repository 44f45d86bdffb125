// Package process runs relays of tests as processes, so that tests can kill relays.
package process

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
	"github.com/peerlane/peerlane/internal/testutil"
	"github.com/peerlane/peerlane/relay"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/softhost"
)

// Devices are the tests' host: GPUs 0 and 1 are clients, 2 and 3 servers beside NICs.
var Devices = func() (list []sim.Device) {
	for i := range 4 {
		list = append(list, sim.Device{
			Index: i, Minor: i, Memory: 16 << 30, Name: "NVIDIA H100 80GB HBM3",
			UUID:  fmt.Sprintf("GPU-00000000-0000-0000-0000-00000000000%x", i+1),
			BusID: fmt.Sprintf("0000:%02x:00.0", i+0x10),
		})
	}
	return list
}()

// configVariable has the test program be a relay with this configuration.
const configVariable = "PEERLANE_TEST_CONFIG"

// Main is the TestMain of a package: Main runs the tests on a simulated host of Devices with the
// software devices nic0 and nic1, or serves as a relay that Start has started.
func Main(m *testing.M) {
	logrus.SetLevel(logrus.ErrorLevel)
	if text := os.Getenv(configVariable); text != "" {
		if err := serve(text); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	dir, err := os.MkdirTemp("", "peerlane-relays-test-")
	if err == nil {
		err = sim.Use(filepath.Join(dir, "host"), Devices)
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

// Dir returns a directory with a path short enough for sockets.
func Dir(t testing.TB) string {
	t.Helper()
	return testutil.ShortDir(t)
}

// Lane returns the lane of GPU 0 or 1, over NIC nic0 or nic1.
func Lane(i int) launch.Lane {
	gpu := func(i int) launch.GPU {
		return launch.GPU{UUID: Devices[i].UUID, BusID: Devices[i].BusID, Index: i}
	}
	nic := fmt.Sprintf("nic%d", i)
	return launch.Lane{
		GPU: gpu(i), Role: "far", Relay: true, Servers: []launch.GPU{gpu(2 + i)}, NICs: []string{nic},
		NIC: &launch.NIC{Name: nic, GUID: 0xe040a10003c288a0, Mbps: 200000, Port: 2}, PeerMbps: 2966400,
	}
}

// Relay is the process of a relay.
type Relay struct {
	*exec.Cmd
	Socket string // for clients
	Stderr *bytes.Buffer
}

// Kill kills the process and waits for its end.
func (r *Relay) Kill() {
	_ = r.Process.Kill() // the process may have ended
	_ = r.Wait()
}

// Start starts the relay of a container and waits until the relay serves. The configuration has the
// container, the route, the lanes and, as Peers, the directory of Dir.
func Start(t testing.TB, c launch.Config) *Relay {
	t.Helper()
	var id [16]byte
	if _, err := rand.Read(id[:]); err != nil {
		t.Fatal(err)
	}
	c.Generation, c.Transport, c.Slots, c.SlotBytes = hex.EncodeToString(id[:]), launch.TransportAuto, 4, 1<<20
	if c.Route != launch.RouteDirect {
		softhost.Configure(&c)
	}
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := &Relay{Cmd: exec.Command(exe), Socket: filepath.Join(c.Peers, c.Container), Stderr: &bytes.Buffer{}}
	r.Env = append(os.Environ(), configVariable+"="+string(text))
	r.Cmd.Stderr = r.Stderr
	out, err := r.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Kill)
	said := make([]byte, 6)
	if _, err := out.Read(said); err != nil || string(said) != "ready\n" {
		r.Kill() // before its standard error is read
		t.Fatalf("the relay says %q, %v: %s", said, err, r.Stderr)
	}
	return r
}

func listen(path string) (*net.UnixListener, error) {
	_ = os.Remove(path) // of a killed relay
	return net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
}

// serve serves until the kill.
func serve(text string) error {
	time.AfterFunc(10*time.Minute, func() { os.Exit(1) }) // the limit of a relay whose test was killed
	var c launch.Config
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	clients, err := listen(filepath.Join(c.Peers, c.Container))
	if err != nil {
		return err
	}
	peers, err := listen(filepath.Join(c.Peers, c.Generation+".sock"))
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
	fmt.Println("ready")
	return r.Run()
}
