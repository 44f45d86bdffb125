// Command containerd-client runs containers with containerd's own Go client, as embedding programs
// do: the engine "containerd's Go client" in the tests of package engines.
//
//	containerd-client ADDRESS run|start|restart|exec|pause|unpause|update|checkpoint|remove REQUEST
//
// REQUEST is a JSON object, the type request.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cdi"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

type request struct {
	Name      string
	Image     string
	Arguments []string
	Devices   []string
	ReadOnly  bool
	User      bool // uid and gid 1000
	UserNS    bool
	Memory    int64    // limit in bytes; 0 for no limit
	Command   []string // of exec
	Directory string   // of checkpoint
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "containerd-client:", err)
		os.Exit(1)
	}
}

func run() (err error) {
	if len(os.Args) != 4 {
		return errors.New(
			"usage: containerd-client ADDRESS run|start|restart|exec|pause|unpause|update|checkpoint|remove REQUEST")
	}
	var r request
	if err := json.Unmarshal([]byte(os.Args[3]), &r); err != nil {
		return err
	}
	c, err := client.New(os.Args[1])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	ctx := namespaces.WithNamespace(context.Background(), "default")
	switch verb := os.Args[2]; verb {
	case "run":
		return errors.Join(runToEnd(ctx, c, r), remove(ctx, c, r))
	case "start":
		container, err := create(ctx, c, r)
		if err != nil {
			return err
		}
		_, err = start(ctx, container)
		return err
	case "restart":
		container, err := c.LoadContainer(ctx, r.Name)
		if err != nil {
			return err
		}
		if err := end(ctx, container); err != nil {
			return err
		}
		_, err = start(ctx, container)
		return err
	case "remove":
		return remove(ctx, c, r)
	default:
		container, err := c.LoadContainer(ctx, r.Name)
		if err != nil {
			return err
		}
		task, err := container.Task(ctx, nil)
		if err != nil {
			return err
		}
		return do(ctx, verb, container, task, r)
	}
}

// do executes a command on a running container.
func do(ctx context.Context, verb string, container client.Container, task client.Task, r request) error {
	switch verb {
	case "exec":
		return exec(ctx, container, task, r)
	case "pause":
		return task.Pause(ctx)
	case "unpause":
		return task.Resume(ctx)
	case "update":
		shares := uint64(512)
		return task.Update(ctx, client.WithResources(&specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}}))
	case "checkpoint":
		_, err := task.Checkpoint(ctx, client.WithCheckpointImagePath(r.Directory))
		return err
	}
	return fmt.Errorf("unknown verb %q", verb)
}

// exec runs a command in the container to its end.
func exec(ctx context.Context, container client.Container, task client.Task, r request) error {
	spec, err := container.Spec(ctx)
	if err != nil {
		return err
	}
	process := *spec.Process
	process.Args, process.Terminal = r.Command, false
	execution, err := task.Exec(ctx, "another", &process, cio.NullIO)
	if err != nil {
		return err
	}
	exited, err := execution.Wait(ctx)
	if err == nil {
		err = execution.Start(ctx)
	}
	if err == nil {
		status := <-exited
		var code uint32
		if code, _, err = status.Result(); err == nil && code != 0 {
			err = fmt.Errorf("%q ended with status %d", r.Command, code)
		}
	}
	_, deleted := execution.Delete(ctx, client.WithProcessKill)
	return errors.Join(err, deleted)
}

func create(ctx context.Context, c *client.Client, r request) (client.Container, error) {
	image, err := c.GetImage(ctx, r.Image)
	if err != nil {
		return nil, err
	}
	if err := image.Unpack(ctx, ""); err != nil {
		return nil, err
	}
	options := []oci.SpecOpts{oci.WithDefaultSpec(), oci.WithDefaultUnixDevices, oci.WithImageConfig(image),
		oci.WithProcessArgs(r.Arguments...)}
	snapshot := client.WithNewSnapshot(r.Name, image)
	if r.ReadOnly {
		options = append(options, oci.WithRootFSReadonly())
	}
	if r.User {
		options = append(options, oci.WithUserID(1000))
	}
	if r.Memory > 0 {
		options = append(options, oci.WithMemoryLimit(uint64(r.Memory)))
	}
	if r.UserNS {
		ids := []specs.LinuxIDMapping{{ContainerID: 0, HostID: 100000, Size: 65536}}
		options = append(options, oci.WithUserNamespace(ids, ids))
		snapshot = client.WithUserNSRemappedSnapshot(r.Name, image, ids, ids)
	}
	// Apply CDI after all other changes of the specification.
	options = append(options, cdi.WithCDIDevices(r.Devices...))
	return c.NewContainer(ctx, r.Name, client.WithImage(image), snapshot, client.WithNewSpec(options...))
}

func start(ctx context.Context, container client.Container) (client.Task, error) {
	task, err := container.NewTask(ctx, cio.NullIO)
	if err != nil {
		return nil, err
	}
	if err := task.Start(ctx); err != nil {
		_, deleted := task.Delete(ctx, client.WithProcessKill)
		return nil, errors.Join(err, deleted)
	}
	return task, nil
}

func runToEnd(ctx context.Context, c *client.Client, r request) error {
	container, err := create(ctx, c, r)
	if err != nil {
		return err
	}
	task, err := container.NewTask(ctx, cio.NullIO)
	if err != nil {
		return err
	}
	exited, err := task.Wait(ctx)
	if err != nil {
		return err
	}
	if err := task.Start(ctx); err != nil {
		return err
	}
	status := <-exited
	if code, _, err := status.Result(); err != nil || code != 0 {
		return errors.Join(fmt.Errorf("the container ended with status %d", code), err)
	}
	return nil
}

// end ends a container's task, if any.
func end(ctx context.Context, container client.Container) error {
	task, err := container.Task(ctx, nil)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	exited, err := task.Wait(ctx)
	if err != nil {
		return err
	}
	if err := task.Kill(ctx, syscall.SIGTERM); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	<-exited
	_, err = task.Delete(ctx)
	return err
}

func remove(ctx context.Context, c *client.Client, r request) error {
	container, err := c.LoadContainer(ctx, r.Name)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := end(ctx, container); err != nil {
		return err
	}
	return container.Delete(ctx, client.WithSnapshotCleanup)
}
