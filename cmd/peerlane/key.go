//go:build !front

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/peerlane/peerlane/cmd/terminal/table"
	"github.com/peerlane/peerlane/config"
	"github.com/peerlane/peerlane/config/paths"
	"github.com/peerlane/peerlane/internal/fault"
	"github.com/peerlane/peerlane/relay/network"
)

func newKeyCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "key",
		Short: "Manage the cluster key",
		Long: `Manage the cluster key: relays of different hosts connect only if both have the key. It
is in etc/peerlane/cluster.key, or the path of network.key in config.toml, and every
host of the cluster has the same file.

Relays of containers that start on a host with the key connect to other hosts.

docs/network.md describes how to rotate the key of a running cluster.`,
		Example: `  peerlane key generate
  peerlane key show`,
	}
	cmd.AddCommand(newKeyGenerateCommand(a), newKeyRotateCommand(a), newKeyShowCommand(a))
	return group(cmd)
}

// keyReport is the JSON document of peerlane key. It contains no secret.
type keyReport struct {
	File string `json:"file"`
	// Keys has the current key first and, during a rotation, the previous key second.
	Keys []keyRow `json:"keys"`
}

type keyRow struct {
	// Use is "current" or "previous".
	Use string `json:"use"`
	// ID has 16 hexadecimal digits.
	ID      string    `json:"id"`
	Created time.Time `json:"created"`
}

func (a *app) reportKeys(form, path string, keys network.Keys, next string) error {
	r := keyReport{File: path, Keys: []keyRow{{"current", keys.Current.ID.String(), keys.Current.Created}}}
	if p := keys.Previous; p != nil {
		r.Keys = append(r.Keys, keyRow{"previous", p.ID.String(), p.Created})
	}
	if form == formJSON {
		return a.printJSON(r)
	}
	t := a.newTable("KEY", "USE", "CREATED")
	for _, k := range r.Keys {
		t.AppendRow(table.Row{k.ID, k.Use, fmt.Sprintf("%s, %s", k.Created.Format(time.RFC3339), humanize.Time(k.Created))})
	}
	a.out.Printf("%s\n%s\n", path, t.Render())
	if next != "" {
		a.out.PrintLines("\n" + next + "\n")
	}
	return nil
}

// copyKey copies the key in one step, and at no time with access for other users.
const copyKey = `  ssh root@host2 'install -d -m 755 /etc/peerlane && umask 077 &&
    cat > /etc/peerlane/.new && mv /etc/peerlane/.new /etc/peerlane/cluster.key' < /etc/peerlane/cluster.key`

func newKeyGenerateCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "generate",
		Short: "Create the cluster key, on the first host",
		Long: `Create a cluster key of 256 random bits in a file readable only by root. Copy it to the
other hosts of the cluster over a confidential channel.

The command does not replace an existing key, because relays could then not connect to
hosts with the old key; use peerlane key rotate.`,
		Example: "  peerlane key generate\n" + copyKey,
		Args:    noArgs,
	}
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		var keys network.Keys
		path, err := a.changeKeys(func(path string, old *network.Keys) (network.Keys, error) {
			if old != nil {
				return keys, fmt.Errorf("%s exists, with %v; change the key with peerlane key rotate", path, *old)
			}
			keys = network.Keys{Current: network.NewKey(time.Now())}
			return keys, nil
		})
		if err != nil {
			return err
		}
		return a.reportKeys(form.value, path, keys, "Copy this file to the other hosts, mode 0600, owner root.")
	}
	return cmd
}

func newKeyRotateCommand(a *app) *cobra.Command {
	var finish bool
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Rotate the cluster key in two steps, without an outage",
		Long: `Start using a new cluster key, and keep the previous one: hosts with this file and hosts
with the last file still connect, so copy the file to the hosts in any order. When every
host has it, end the rotation with --finish on each host, or on one before copying again.

peerlane key show prints the ids of a host's keys.`,
		Example: "  peerlane key rotate\n" + copyKey + `
                                  and so on, to each host in any order
  peerlane key rotate --finish    on each, in any order`,
		Args: noArgs,
	}
	cmd.Flags().BoolVar(&finish, "finish", false, "drop the previous key, when every host has the new key")
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		var keys network.Keys
		path, err := a.changeKeys(func(path string, old *network.Keys) (_ network.Keys, err error) {
			switch {
			case old == nil:
				err = noClusterKey(path)
			case finish:
				keys, err = old.Finish()
			default:
				keys, err = old.Rotate(time.Now())
			}
			return keys, err
		})
		if err != nil {
			return err
		}
		next := ""
		if !finish {
			next = "Copy this file to the other hosts, in any order; when all have it: peerlane key rotate --finish on each."
		}
		return a.reportKeys(form.value, path, keys, next)
	}
	return cmd
}

func newKeyShowCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "show",
		Short: "Show the ids and dates of the cluster key, never the secret",
		Long: `Show id and creation time of this host's cluster key, and during a rotation of the
previous key, which is still accepted. Hosts with the same ids have the same keys. The
secret is not shown.`,
		Example: `  peerlane key show
  peerlane key show -o json`,
		Args: noArgs,
	}
	form := addForm(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		path, err := a.keyFile()
		if err != nil {
			return err
		}
		keys, err := readKeys(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return noClusterKey(path)
		case err != nil:
			return asRoot(err)
		}
		return a.reportKeys(form.value, path, *keys, "")
	}
	return cmd
}

// keyFile returns the path of the key in the configuration.
func (a *app) keyFile() (string, error) {
	c, err := config.Load(a.layout.ConfigFile())
	if err != nil {
		return "", err
	}
	if c.Network.Key != "" {
		return c.Network.Key, nil
	}
	return a.layout.ClusterKey(), nil
}

func readKeys(path string) (*network.Keys, error) {
	text, err := paths.ReadSecret(path, network.MaxKeyFile)
	if err != nil {
		return nil, fmt.Errorf("cluster key: %w", err)
	}
	keys, err := network.ParseKeys(text)
	if err != nil {
		return nil, fmt.Errorf("cluster key %s: %w", path, err)
	}
	return &keys, nil
}

// changeKeys replaces the key file in one step, under a lock. old is nil if no file exists.
func (a *app) changeKeys(change func(path string, old *network.Keys) (network.Keys, error)) (string, error) {
	path, err := a.keyFile()
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(path)
	if path == a.layout.ClusterKey() {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return path, asRoot(err)
		}
	}
	// The lock is a separate file with mode 0600: any process that can open a file can keep it
	// locked, and every user can open the directory. The lock file is never removed, because
	// otherwise two commands could each lock a different inode.
	lock, err := os.OpenFile(filepath.Join(dir, "."+filepath.Base(path)+".lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW,
		0o600)
	if err != nil {
		return path, asRoot(fmt.Errorf("cluster key: %w", err))
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return path, fmt.Errorf("cluster key: locking %s: %w", lock.Name(), err)
	}
	old, err := readKeys(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return path, asRoot(err)
	}
	keys, err := change(path, old)
	if err != nil {
		return path, fmt.Errorf("cluster key: %w", err)
	}
	return path, asRoot(writeSecret(path, keys.Text()))
}

// writeSecret replaces a file in one step by a file with mode 0600.
func writeSecret(path string, text []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*") // mode 0600
	if err != nil {
		return fmt.Errorf("cluster key: %w", err)
	}
	defer os.Remove(f.Name()) // fails after the rename
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("cluster key %s: %w", path, err)
	}
	// The rename survives a power failure once the directory is on disk.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fmt.Errorf("cluster key %s: %w", path, err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("cluster key %s: %w", path, err)
	}
	return nil
}

// noClusterKey returns the error of a host without a cluster key.
func noClusterKey(path string) error {
	return &fault.Error{Code: fault.NoClusterKey, Operation: "read the cluster key", Object: path,
		Cause:  os.ErrNotExist,
		Remedy: "run peerlane key generate on the first host of a cluster, and copy the file to the other hosts"}
}
