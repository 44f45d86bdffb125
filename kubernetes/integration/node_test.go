//go:build cluster

package integration

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/internal/testutil"
)

// secondNode has network, mount and PID namespaces of its own: its kubelet, engine, driver, relays and
// files are apart from those of the first node. Both nodes have one kernel, and so one boot id.
const secondNode = "n2"

// cables are the interfaces of the nodes' network.
var cables = map[string]string{nodeName: "cable0", secondNode: "cable1"}

// connectNodes makes the network of the second node.
const connectNodes = `set -eu
ip netns add n2
ip link add cable0 type veth peer name cable1 netns n2
ip address add 10.214.0.1/24 dev cable0
ip link set cable0 up
ip netns exec n2 ip link set lo up
ip netns exec n2 ip address add 10.214.0.2/24 dev cable1
ip netns exec n2 ip link set cable1 up
ip netns exec n2 ip route add default via 10.214.0.1`

// isolateNode gives the second node other files below the root of the first node ($1), from the directory
// $2. The directory of reports is that of the first node. Nodes with one root have control groups of one
// name, so the second node sees only a part of the hierarchy.
const isolateNode = `set -eu
groups=$(findmnt --first-only --noheadings --output TARGET --types cgroup2)
mkdir $groups/${2##*/}
mount --bind $groups/${2##*/} $groups
mkdir $2/reports
mount --bind $1/reports $2/reports
for dir in /run /var/lib/kubelet; do mount -t tmpfs tmpfs $dir; done
mkdir /run/lock /run/cdi
mount --rbind $2 $1
shift 2
exec "$@"`

// Lines between a test and the process of the second node, which also prints the output of a test.
const (
	nodeReady   = "node: ready"
	nodeUseHook = "use the installed hook"
)

// secondProcess is the process of the second node.
type secondProcess struct {
	*testing.T
	orders io.WriteCloser
	lines  chan string // closed at the end of the node's output
	output bytes.Buffer
	stderr bytes.Buffer
}

// startSecondNode starts the second node of a cluster, which ends with the test.
func (c *cluster) startSecondNode() *secondProcess {
	c.Helper()
	files, err := os.MkdirTemp("", "pl")
	if err != nil {
		c.Fatal(err)
	}
	c.Cleanup(func() {
		if err := os.RemoveAll(files); err != nil {
			c.Error(err)
		}
	})
	self, err := os.Executable()
	if err != nil {
		c.Fatal(err)
	}
	kubeconfig, err := os.ReadFile(c.in("kubeconfig"))
	if err != nil {
		c.Fatal(err)
	}
	// Process 1 is confine, and becomes process 1 of the node's PID namespace, too.
	x := exec.Command("nsenter", "--net=/run/netns/n2", "/proc/1/exe", "sh", "-c", isolateNode, "sh", c.Root, files, self,
		"node", c.Root, string(kubeconfig), c.options.tenants)
	p := &secondProcess{T: c.T}
	if p.orders, err = x.StdinPipe(); err != nil {
		c.Fatal(err)
	}
	out, err := x.StdoutPipe()
	if err != nil {
		c.Fatal(err)
	}
	p.lines = make(chan string, 1000)
	x.Stderr = &p.stderr
	if err := x.Start(); err != nil {
		c.Fatal(err)
	}
	go func() {
		defer close(p.lines)
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			p.lines <- lines.Text()
		}
		_, _ = io.Copy(io.Discard, out) // after a line that is too long the node goes on
	}()
	c.Cleanup(func() {
		p.orders.Close() // ends the node
		for line := range p.lines {
			fmt.Fprintln(&p.output, line)
		}
		if err := x.Wait(); err != nil || c.Failed() {
			c.Errorf("node %s: %v: %s%s", secondNode, err, p.output.Bytes(), p.stderr.Bytes())
		}
		c.mustDo("sh", "-c", `find $(findmnt --first-only --noheadings --output TARGET --types cgroup2)/$1 -depth -type d \
			-exec rmdir {} +`, "sh", filepath.Base(files))
	})
	p.untilReady()
	return p
}

// untilReady waits until the node has executed an order.
func (p *secondProcess) untilReady() {
	p.Helper()
	for end := testutil.BeginFor(5 * time.Minute); !end.Over(); {
		select {
		case line, open := <-p.lines:
			if !open {
				p.Fatalf("node %s ended", secondNode)
			}
			if line == nodeReady {
				return
			}
			fmt.Fprintln(&p.output, line)
		case <-time.After(time.Second):
		}
	}
	p.Fatalf("node %s has not executed an order", secondNode)
}

func (p *secondProcess) order(line string) {
	p.Helper()
	if _, err := fmt.Fprintln(p.orders, line); err != nil {
		p.Fatal(err)
	}
	p.untilReady()
}

// runNode is the process of the second node, a test: it executes orders until standard input ends.
func runNode(root, kubeconfig, tenants string) {
	node := func(t *testing.T) {
		var err error
		if peerlanes, _, err = programs.Directory(programs.Peerlane, programs.Hook, programs.Relay); err != nil {
			t.Fatal(err)
		}
		c := newNode(t, options{twoNodes: true, tenants: tenants}, root, secondNode)
		c.configure()
		if err := os.WriteFile(c.in("kubeconfig"), []byte(kubeconfig), 0o600); err != nil {
			t.Fatal(err)
		}
		c.connect()
		c.startEngine()
		c.importImage()
		c.startKubelet()
		c.startNVIDIA()
		fmt.Println(nodeReady)
		for orders := bufio.NewScanner(os.Stdin); orders.Scan(); fmt.Println(nodeReady) {
			switch orders.Text() {
			case nodeUseHook:
				c.useInstalledHook()
			default:
				t.Fatalf("unknown order %q", orders.Text())
			}
		}
	}
	os.Args = append(os.Args[:1], "-test.v")
	testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "Node", F: node}},
		nil, nil)
}

// carried returns the number of bytes that the nodes' network has carried to the first node.
func (c *cluster) carried() uint64 {
	c.Helper()
	var links []struct {
		Stats struct{ RX struct{ Bytes uint64 } } `json:"stats64"`
	}
	if err := json.Unmarshal([]byte(c.mustDo("ip", "-s", "-j", "link", "show", "dev", cables[nodeName])),
		&links); err != nil || len(links) != 1 {
		c.Fatalf("%d interfaces, %v", len(links), err)
	}
	return links[0].Stats.RX.Bytes
}
