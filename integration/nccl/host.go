package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/peerlane/bundle"
	"github.com/peerlane/peerlane/cmd/peerlane/testbed"
	"github.com/peerlane/peerlane/cmd/version"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/relay/launch"
	"github.com/peerlane/peerlane/relay/nccl"
	cluster "github.com/peerlane/peerlane/relay/network"
	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/ncclxml"
	"github.com/peerlane/peerlane/topo/planner"
	"github.com/peerlane/peerlane/topo/virtualswitch"
)

// Runtimes of ranks.
const (
	runtimeAuto = "auto"
	runtimeNone = "none"
)

// host is the machine that ranks run on.
type host struct {
	options
	*testbed.Host
	// work is a private directory that the host removes at the end. work/inside has the files that
	// ranks run, at the same path in containers; work/logs has a folder for each phase.
	work    string
	gpus    []topo.GPU // one GPU for each rank
	ranks   int
	runtime *bundle.Runtime // nil: plain processes
	why     string          // the reason for the lack of a runtime
	specs   string          // folder of the installation's CDI specifications, with --installed
	network *network        // nil: ranks share the host's
	alone   string          // reason if no runtime works
	hosts   *hosts          // network namespaces of relays; nil before the first phase that uses them
	starts  int
}

func newHost(ctx context.Context, o options) (h *host, err error) {
	h = &host{options: o}
	h.plugin = cmp.Or(h.plugin, filepath.Join(h.binaries, nccl.Name))
	for _, path := range []*string{&h.binaries, &h.plugin, &h.out, &h.script} {
		if *path, err = filepath.Abs(*path); err != nil {
			return nil, err
		}
	}
	if err := os.MkdirAll(h.out, 0o755); err != nil {
		return nil, err
	}
	if h.work, err = os.MkdirTemp("", "peerlane-nccl-"); err != nil {
		return nil, err
	}
	made := h // a return of an error sets h to nil before the deferred call
	defer func() {
		if err != nil {
			err = errors.Join(err, made.close())
		}
	}()
	root := filepath.Join(h.work, "host")
	// Unprivileged relays traverse both directories unless they have a private root.
	if err := errors.Join(os.Mkdir(root, 0o711), os.Mkdir(h.inside(), 0o755), os.Mkdir(h.logs(), 0o755),
		os.Chmod(h.work, 0o711)); err != nil {
		return nil, err
	}
	if h.Host, err = testbed.New(root, h.binaries, h.options.gpus); err != nil {
		return nil, err
	}
	if h.installed {
		if err := h.useInstallation(); err != nil {
			return nil, err
		}
	} else if paths.MountsAnchor() {
		if err := h.Layout.MountAnchor(); err != nil {
			return nil, err
		}
	}
	files := map[string]string{}
	if !h.installed {
		files[h.plugin] = nccl.Name
	}
	if h.program == "" {
		files[h.script] = "rank.py"
	} else {
		files[h.program] = "program"
	}
	for _, version := range nccl.Versions {
		name := nccl.NameOf(version)
		if path := filepath.Join(h.binaries, name); exists(path) {
			files[path] = name
		}
	}
	for from, to := range files {
		if err := bundle.CopyFile(from, filepath.Join(h.inside(), to)); err != nil {
			return nil, err
		}
	}
	all := h.Topology.GPUs
	if h.oneGPU {
		all = all[:1]
	}
	if err := h.assign(all); err != nil {
		return nil, err
	}
	if h.installed {
		return h, h.findContainers(ctx)
	}
	h.Lanes = nil
	for i, g := range all {
		lane := planner.Assignment{GPU: g.BusID, NICs: []string{"software0"}}
		if len(all) > 1 {
			// On route staged a GPU stages on the next GPU.
			lane.Servers = []string{all[(i+1)%len(all)].BusID}
		} else {
			lane.Kind = planner.KindBounce
		}
		h.Lanes = append(h.Lanes, lane)
	}
	if err := h.configure(settings{Route: launch.RouteDirect}); err != nil {
		return nil, err
	}
	if err := h.writeTopology(); err != nil {
		return nil, err
	}
	h.findRuntime(ctx)
	if h.runtime == nil {
		h.alone = "plain processes"
		if o.runtime != runtimeAuto && o.runtime != runtimeNone {
			return nil, fmt.Errorf("%s: %s", o.runtime, h.why)
		}
		return h, nil
	}
	if h.network, err = newNetwork(h.work, h.ranks); err != nil {
		h.network, h.alone = nil, err.Error()
	}
	return h, nil
}

// assign gives the ranks GPUs.
func (h *host) assign(all []topo.GPU) error {
	if h.ranks = h.options.ranks; h.ranks == 0 {
		h.ranks = max(len(all), 2) // on a host with one GPU two ranks share the GPU
	}
	if h.ranks < 2 {
		return fmt.Errorf("%d ranks: two are needed", h.ranks)
	}
	for i := range h.ranks {
		h.gpus = append(h.gpus, all[i%len(all)])
	}
	return nil
}

func (h *host) inside() string { return filepath.Join(h.work, "inside") }
func (h *host) logs() string   { return filepath.Join(h.work, "logs") }

func (h *host) close() error {
	var err error
	if h.network != nil {
		err = h.network.close()
	}
	if h.hosts != nil {
		err = errors.Join(err, h.hosts.close())
	}
	if h.Host != nil && (!h.installed || h.Simulated) {
		_, unmounted := h.Layout.UnmountAnchor()
		err = errors.Join(err, unmounted)
	}
	return errors.Join(err, os.RemoveAll(h.work))
}

func (h *host) configure(s settings) error {
	err := os.Remove(h.Layout.ClusterKey())
	if s.Transport != "" { // relays with an equal key find each other over the network
		err = os.WriteFile(h.Layout.ClusterKey(), cluster.Keys{Current: cluster.NewKey(time.Now())}.Text(), 0o600)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return h.Configure(func(c *config.Config) {
		c.Relay.Route = s.Route
		if s.Transport != "" {
			c.Relay.Transport = s.Transport
			c.Network.Interfaces, c.Network.Family, c.Network.Streams = "=lo", "ipv4", s.Streams
			if s.Hosts {
				c.Network.Interfaces = "=" + cable
			}
		}
		if h.Simulated {
			c.Relay.Slots, c.Relay.SlotSize = 8, 4<<20 // staging is host memory in this program
		}
	})
}

// topologyFile describes the host with the virtual switch of its lanes, for NCCL.
const topologyFile = "topology.xml"

func (h *host) writeTopology() error {
	virtual, err := virtualswitch.New(h.Topology, h.Plan)
	if err != nil {
		return err
	}
	text, err := ncclxml.Write(virtual)
	if err != nil {
		return err
	}
	// Keep a copy of NCCL's input for later analysis.
	return errors.Join(os.WriteFile(filepath.Join(h.inside(), topologyFile), text, 0o644),
		os.WriteFile(filepath.Join(h.logs(), topologyFile), text, 0o644))
}

// findRuntime finds a runtime that can start a container; an installed runtime may lack permission.
// Without such a runtime h.why has the reason.
func (h *host) findRuntime(ctx context.Context) {
	names := []string{"runc", "crun"}
	switch {
	case h.options.runtime == runtimeNone:
		h.why = "asked for"
		return
	case h.options.runtime != runtimeAuto:
		names = []string{h.options.runtime}
	}
	if os.Geteuid() != 0 {
		h.why = "containers need root"
		return
	}
	var reasons []string
	for _, name := range names {
		path := filepath.Join(h.binaries, name)
		if _, err := os.Stat(path); err != nil {
			path = name
		}
		r, err := bundle.FindRuntime(path, h.RuntimeState())
		if err == nil {
			err = h.try(ctx, r)
		}
		if err == nil {
			h.runtime = r
			return
		}
		reasons = append(reasons, err.Error())
	}
	h.why = strings.Join(reasons, "; ")
}

// try runs a container that only exits.
func (h *host) try(ctx context.Context, r *bundle.Runtime) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	b, err := h.bundle(filepath.Join(h.work, "try-"+r.Name), settings{By: byPeerlane}, h.gpus[:1], h.logs(), "",
		[]string{"/bin/sh", "-c", "test -S /run/peerlane/relay.sock"})
	if err != nil {
		return err
	}
	id := h.ContainerID("try-" + r.Name)
	out, err := r.Run(ctx, b, id).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s cannot run a container with a lane here: %w: %s", r.Name, err, strings.TrimSpace(string(out)))
	}
	return errors.Join(err, r.Delete(context.WithoutCancel(ctx), id))
}

// bundle creates a container of the host's files, read-only, with GPUs and lanes, and private
// namespaces. The network is a namespace's file, or the host's.
func (h *host) bundle(dir string, s settings, gpus []topo.GPU, logs, network string, arguments []string,
	environment ...string) (*bundle.Bundle, error) {
	b := bundle.New(dir, arguments...)
	b.Spec.Process.Env = environment
	var mounts []specs.Mount
	for _, m := range b.Spec.Mounts {
		switch m.Destination {
		case "/dev/shm": // the usual size for PyTorch in Docker (--shm-size)
			m.Options = []string{"nosuid", "noexec", "nodev", "mode=1777", "size=4g"}
		case "/tmp":
			m.Options = []string{"nosuid", "nodev", "mode=1777", "size=1g"}
		}
		mounts = append(mounts, m)
	}
	root := filepath.Join(dir, "rootfs")
	var open []string
	if h.installed {
		// As in an image, the root is writable and the packages' files are mounted into it.
		b.Spec.Root.Readonly, b.Spec.Hostname = false, filepath.Base(dir)
		open = []string{"/usr", "/usr/lib", "/usr/lib64"}
		if err := copyEtc(root); err != nil {
			return nil, err
		}
	}
	grafted, err := graft(root, "/", open)
	if err != nil {
		return nil, err
	}
	b.Spec.Mounts = append(append(mounts, grafted...),
		specs.Mount{Destination: h.inside(), Type: "bind", Source: h.inside(),
			Options: []string{"bind", "ro", "nosuid", "nodev"}},
		specs.Mount{Destination: logs, Type: "bind", Source: logs, Options: []string{"bind", "rw", "nosuid", "nodev"}})
	var namespaces []specs.LinuxNamespace
	for _, n := range b.Spec.Linux.Namespaces {
		if n.Type == specs.NetworkNamespace {
			if network == "" {
				continue
			}
			n.Path = network
		}
		namespaces = append(namespaces, n)
	}
	b.Spec.Linux.Namespaces = namespaces
	if err := h.inject(b, s, gpus); err != nil {
		return nil, err
	}
	return b, b.Write()
}

// graft builds a directory of a container's root file system from the host's directory of the same
// path: read-only mounts of entries, and copies of symbolic links. It also grafts directories in
// open, so that the container can have further files there. Directories that exist in root stay
// unchanged.
func graft(root, path string, open []string) ([]specs.Mount, error) {
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(root, path), 0o755); err != nil {
		return nil, err
	}
	var mounts []specs.Mount
	for _, e := range entries {
		from := filepath.Join(path, e.Name())
		target := filepath.Join(root, from)
		mount := specs.Mount{Destination: from, Type: "bind", Source: from, Options: []string{"rbind", "ro", "rprivate"}}
		switch {
		case exists(target) || from == "/lost+found":
		case e.Type()&os.ModeSymlink != 0:
			to, err := os.Readlink(from)
			if err == nil {
				err = os.Symlink(to, target)
			}
			if err != nil {
				return nil, err
			}
		case slices.Contains(open, from):
			more, err := graft(root, from, open)
			if err != nil {
				return nil, err
			}
			mounts = append(mounts, more...)
		case e.IsDir():
			if err := os.Mkdir(target, 0o755); err != nil {
				return nil, err
			}
			if !slices.Contains([]string{"/proc", "/dev", "/run", "/tmp"}, from) {
				mounts = append(mounts, mount)
			}
		case e.Type().IsRegular() && path != "/":
			if err := os.WriteFile(target, nil, 0o644); err != nil {
				return nil, err
			}
			mounts = append(mounts, mount)
		}
	}
	return mounts, nil
}

// describe begins the result.
func (h *host) describe() *result {
	r := &result{Commit: version.Get().Commit, Host: h.Words, Ranks: h.ranks, Time: time.Now().UTC().Format(time.RFC3339),
		Quick: h.quick}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		r.System = fmt.Sprintf("Linux %s, %d processors", unix.ByteSliceToString(u.Release[:]), runtime.NumCPU())
	}
	if text, err := os.ReadFile("/proc/driver/nvidia/version"); err == nil {
		r.Driver, _, _ = strings.Cut(string(text), "\n")
	}
	if out, err := exec.Command("nvidia-smi", "topo", "-m").Output(); err == nil {
		r.Links = string(out)
	}
	r.Isolation = "plain processes (" + h.why + ")"
	if h.runtime != nil {
		r.Isolation = "containers of " + h.runtime.Name + ", with PID, IPC, mount and UTS namespaces and /dev/shm of " +
			"their own"
	}
	r.Network = "a network namespace each, joined by a bridge"
	if h.installed {
		r.Variables = ofMachine()
	}
	if h.network == nil {
		r.Network = "the host's network for all (" + h.alone + ")"
	}
	return r
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
