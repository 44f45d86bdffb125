package hostinstall

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"
)

// bus is a connection to systemd's private socket.
type bus struct{ *dbus.Conn }

// Connect connects to systemd at the private socket, /run/systemd/private on the host, which accepts root
// alone. The result is nil if the host has no such socket.
func Connect(ctx context.Context, socket string) (Systemd, error) {
	if _, err := os.Stat(socket); errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	conn, err := dbus.NewConnection(func() (*godbus.Conn, error) {
		c, err := godbus.Dial("unix:path="+socket, godbus.WithContext(ctx))
		if err != nil {
			return nil, err
		}
		// systemd is not a message bus: the protocol has no Hello.
		if err := c.Auth([]godbus.Auth{godbus.AuthExternal("0")}); err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return c, nil
	})
	if err != nil {
		return nil, fmt.Errorf("connect to systemd at %s: %w", socket, err)
	}
	return bus{conn}, nil
}

func (b bus) Reload(ctx context.Context) error { return b.ReloadContext(ctx) }

func (b bus) Enable(ctx context.Context, units ...string) error {
	_, _, err := b.EnableUnitFilesContext(ctx, units, false, true)
	return err
}

func (b bus) Start(ctx context.Context, unit string) error {
	return b.job(ctx, unit, b.StartUnitContext)
}

func (b bus) Restart(ctx context.Context, unit string) error {
	return b.job(ctx, unit, b.RestartUnitContext)
}

// job waits for the result of a job.
func (b bus) job(ctx context.Context, unit string,
	begin func(ctx context.Context, name, mode string, result chan<- string) (int, error)) error {
	result := make(chan string, 1)
	if _, err := begin(ctx, unit, "replace", result); err != nil {
		return err
	}
	select {
	case r := <-result:
		if r != "done" {
			return fmt.Errorf("the job ended with the result %s", r)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
