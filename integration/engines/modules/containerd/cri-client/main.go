// Command cri-client runs containers in pods by the CRI, as a kubelet or crictl does.
//
//	cri-client ADDRESS run|start|restart|update|remove CONTAINER POD
//	cri-client ADDRESS exec CONTAINER POD COMMAND...
//	cri-client ADDRESS checkpoint CONTAINER POD FILE
//
// CONTAINER and POD are files with a ContainerConfig and a PodSandboxConfig in JSON, in crictl's
// form. Removing a container that does not exist succeeds.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "cri-client:", err)
		os.Exit(1)
	}
}

type client struct {
	cri.RuntimeServiceClient
	container *cri.ContainerConfig
	pod       *cri.PodSandboxConfig
}

func run() (err error) {
	if len(os.Args) < 5 {
		return errors.New(
			"usage: cri-client ADDRESS run|start|restart|update|remove|exec|checkpoint CONTAINER POD [ARGUMENT...]")
	}
	connection, err := grpc.NewClient("unix://"+os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, connection.Close()) }()
	c := client{cri.NewRuntimeServiceClient(connection), &cri.ContainerConfig{}, &cri.PodSandboxConfig{}}
	for path, into := range map[string]any{os.Args[3]: c.container, os.Args[4]: c.pod} {
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := json.Unmarshal(text, into); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	ctx := context.Background()
	switch verb := os.Args[2]; verb {
	case "run":
		id, err := c.start(ctx)
		if err == nil {
			err = c.wait(ctx, id)
		}
		return errors.Join(err, c.remove(ctx))
	case "start":
		_, err := c.start(ctx)
		return err
	case "restart":
		return c.restart(ctx)
	case "remove":
		return c.remove(ctx)
	case "update":
		return c.each(ctx, func(id string) error {
			_, err := c.UpdateContainerResources(ctx, &cri.UpdateContainerResourcesRequest{ContainerId: id,
				Linux: &cri.LinuxContainerResources{CpuShares: 512}})
			return err
		})
	case "exec":
		return c.each(ctx, func(id string) error {
			done, err := c.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: os.Args[5:]})
			if err == nil && done.ExitCode != 0 {
				err = fmt.Errorf("%q ended with status %d: %s%s", os.Args[5:], done.ExitCode, done.Stdout, done.Stderr)
			}
			return err
		})
	case "checkpoint":
		return c.each(ctx, func(id string) error {
			_, err := c.CheckpointContainer(ctx, &cri.CheckpointContainerRequest{ContainerId: id, Location: os.Args[5]})
			return err
		})
	default:
		return fmt.Errorf("unknown verb %q", verb)
	}
}

func (c client) start(ctx context.Context) (id string, err error) {
	pod, err := c.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: c.pod})
	if err != nil {
		return "", err
	}
	return c.startIn(ctx, pod.PodSandboxId)
}

func (c client) startIn(ctx context.Context, pod string) (id string, err error) {
	created, err := c.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod, Config: c.container,
		SandboxConfig: c.pod})
	if err != nil {
		return "", err
	}
	_, err = c.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: created.ContainerId})
	return created.ContainerId, err
}

func (c client) wait(ctx context.Context, id string) error {
	for ; ; time.Sleep(50 * time.Millisecond) {
		s, err := c.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id})
		if err != nil {
			return err
		}
		if s.Status.State != cri.ContainerState_CONTAINER_EXITED {
			continue
		}
		if s.Status.ExitCode != 0 {
			return fmt.Errorf("the container ended with status %d: %s", s.Status.ExitCode, s.Status.Message)
		}
		return nil
	}
}

// sandboxes returns the pod's sandboxes by name, at most one.
func (c client) sandboxes(ctx context.Context) ([]*cri.PodSandbox, error) {
	list, err := c.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return nil, err
	}
	var found []*cri.PodSandbox
	for _, p := range list.Items {
		if p.Metadata.GetUid() == c.pod.Metadata.GetUid() {
			found = append(found, p)
		}
	}
	return found, nil
}

// each calls do for the container, which must exist.
func (c client) each(ctx context.Context, do func(id string) error) error {
	pods, err := c.sandboxes(ctx)
	if err != nil {
		return err
	}
	found := false
	for _, p := range pods {
		list, err := c.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.Id}})
		if err != nil {
			return err
		}
		for _, one := range list.Containers {
			found = true
			if err := do(one.Id); err != nil {
				return err
			}
		}
	}
	if !found {
		return errors.New("there is no such container")
	}
	return nil
}

// restart replaces the container by the next attempt, in the same pod: a kubelet never starts a
// container twice.
func (c client) restart(ctx context.Context) error {
	pods, err := c.sandboxes(ctx)
	if err != nil {
		return err
	}
	for _, p := range pods {
		list, err := c.ListContainers(ctx, &cri.ListContainersRequest{Filter: &cri.ContainerFilter{PodSandboxId: p.Id}})
		if err != nil {
			return err
		}
		for _, one := range list.Containers {
			if _, err := c.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: one.Id, Timeout: 5}); err != nil {
				return err
			}
			if _, err := c.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: one.Id}); err != nil {
				return err
			}
			c.container.Metadata.Attempt = one.Metadata.Attempt + 1
		}
		if _, err := c.startIn(ctx, p.Id); err != nil {
			return err
		}
	}
	return nil
}

func (c client) remove(ctx context.Context) error {
	pods, err := c.sandboxes(ctx)
	if err != nil {
		return err
	}
	for _, p := range pods {
		if _, err := c.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.Id}); err != nil {
			return err
		}
		if _, err := c.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.Id}); err != nil {
			return err
		}
	}
	return nil
}
