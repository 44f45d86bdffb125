package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Paths after the switch to the disk's root.
const (
	agent  = "/run/peerlane-guest/agent"
	share  = "/share"  // the host's folder for this run
	source = "/source" // Peerlane's source, read-only
)

// unit starts the agent where systemd is process 1.
const unit = `[Unit]
Description=Agent of the host that runs this virtual machine
After=basic.target dbus.socket apparmor.service
[Service]
ExecStart=` + agent + ` serve
StandardOutput=journal+console
StandardError=journal+console
Environment=HOME=/root PATH=/share/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
KillMode=process
Delegate=yes
TasksMax=infinity
LimitMEMLOCK=8M
`

// boot is the work of the initial RAM file system: it loads the modules for the disk, mounts the
// disk, and switches to it.
func boot() error {
	if err := mountAll([]mount{
		{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
		{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID, "mode=755"},
	}); err != nil {
		return err
	}
	options, err := kernelOptions()
	if err != nil {
		return err
	}
	if err := loadModules("/modules"); err != nil {
		return err
	}
	const disk, root = "/dev/vda", "/root"
	if err := waitFor(disk); err != nil {
		return err
	}
	if err := mountAll([]mount{
		{disk, root, "ext4", unix.MS_NOATIME, ""},
		{"tmpfs", root + "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=755"},
		{"share", root + share, "9p", 0, "trans=virtio,version=9p2000.L,msize=512000,cache=none"},
		{"source", root + source, "9p", unix.MS_RDONLY, "trans=virtio,version=9p2000.L,msize=512000,cache=loose"},
	}); err != nil {
		return err
	}
	if err := installAgent(root); err != nil {
		return err
	}
	next := []string{agent, "init"}
	if options["peerlane.image"] == "full" {
		next = []string{"/sbin/init"}
	}
	return switchRoot(root, next)
}

func kernelOptions() (map[string]string, error) {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return nil, err
	}
	options := map[string]string{}
	for _, word := range strings.Fields(string(line)) {
		name, value, _ := strings.Cut(word, "=")
		options[name] = value
	}
	return options, nil
}

// loadModules loads the modules in the file "order" in dir.
func loadModules(dir string) error {
	order, err := os.ReadFile(filepath.Join(dir, "order"))
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(order)) {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("load %s: %w", name, err)
		}
	}
	return nil
}

// waitFor waits for a device node, which the kernel creates after it has found the device.
func waitFor(path string) error {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, err := os.Stat(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) || time.Now().After(deadline) {
			return err
		}
	}
}

// installAgent copies this program, and a unit for systemd, below /run of the new root: the image
// does not depend on the agent.
func installAgent(root string) error {
	text, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	const units = "/run/systemd/system"
	for _, dir := range []string{filepath.Dir(agent), units + "/multi-user.target.wants"} {
		if err := os.MkdirAll(root+dir, 0o755); err != nil {
			return err
		}
	}
	if err := os.WriteFile(root+agent, text, 0o755); err != nil {
		return err
	}
	// For users of a shell.
	if err := os.Symlink(agent, root+"/usr/local/bin/guest"); err != nil {
		return err
	}
	const name = "peerlane-guest.service"
	if err := os.WriteFile(filepath.Join(root+units, name), []byte(unit), 0o644); err != nil {
		return err
	}
	return os.Symlink("../"+name, filepath.Join(root+units, "multi-user.target.wants", name))
}

// switchRoot makes root the file system root and executes argv in it.
func switchRoot(root string, argv []string) error {
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if err := unix.Mount(dir, root+dir, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", dir, err)
		}
	}
	if err := os.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	environment := []string{"HOME=/root", "TERM=linux",
		"PATH=/share/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return fmt.Errorf("execute %q: %w", argv, unix.Exec(argv[0], argv, environment))
}
