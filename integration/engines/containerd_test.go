//go:build engines

package engines

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/peerlane/peerlane/integration/image"
)

// imageName is the image in docs/containers.md and the name of the tests' own image in every
// engine, so that no registry is needed.
const imageName = "docker.io/library/debian:12"

// startContainerd starts a daemon and returns its address.
func (b *bed) startContainerd(program, configuration, namespace string) (address string) {
	b.Helper()
	dir := b.mkdir("containerd")
	address = dir + "/containerd.sock"
	head := fmt.Sprintf("root = %q\nstate = %q\n", dir+"/root", dir+"/state")
	daemon := fmt.Sprintf("[grpc]\naddress = %q\n[ttrpc]\naddress = %q\n", address, address+".ttrpc")
	file := b.configure("containerd", "containerd.toml", fmt.Sprintf(configuration, head, daemon, imageName))
	ctr := filepath.Join(filepath.Dir(program), "ctr")
	ready := func() error { return b.ground.do(context.Background(), ctr, "--address", address, "version") }
	b.daemon = b.ground.daemon(b.T, ready, program, "--config", file)
	b.mustDo(ctr, "--address", address, "--namespace", namespace, "images", "import", b.image.OCI)
	return address
}

// configuration2 is containerd's configuration without options that this machine forbids.
const configuration2 = `version = 3
%s%s[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true
cdi_spec_dirs = ["/nowhere"] # peerlane runtime configure adds those of every engine
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = %q
`

func containerd2(client func(b *bed, address string) engine) func(*bed) engine {
	return func(b *bed) engine {
		path := []string{installed.Containerd, installed.Runc, "/usr/sbin", "/usr/bin", "/sbin", "/bin"}
		b.ground.environment = append(b.ground.environment, "PATH="+strings.Join(path, ":"))
		program := filepath.Join(installed.Containerd, "containerd")
		b.mustBe(containerd2Version, program, "--version")
		b.mustBe(runc15, "runc", "--version")
		address := b.startContainerd(program, configuration2, "default")
		b.mustDo("ctr", "--address", address, "--namespace", "k8s.io", "images", "import", b.image.OCI)
		return client(b, address)
	}
}

func containerd17(b *bed) engine {
	b.mustBe(containerd17Version, "/usr/bin/containerd", "--version")
	const configuration = "version = 2\n%s%s[plugins.\"io.containerd.grpc.v1.cri\"]\nrestrict_oom_score_adj = " +
		"true\nsandbox_image = %q\n"
	address := b.startContainerd("/usr/bin/containerd", configuration, "k8s.io")
	// Peerlane has written the text that docs/containers.md shows.
	text, err := os.ReadFile(b.configured.file)
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(documented(b, "containerd 1.7", "toml")) {
		if !strings.Contains(string(text), line) {
			b.Errorf("docs/containers.md has the line %q, which peerlane runtime configure has not written: %s", line, text)
		}
	}
	return criField(b, address)
}

// containerdByCtr returns a containerd of Debian of a release whose ctr has no CDI devices.
func containerdByCtr(version string) func(*bed) engine {
	return func(b *bed) engine {
		b.mustBe(version, "/usr/bin/containerd", "--version")
		const configuration = "version = 2\n%s%s[plugins.\"io.containerd.grpc.v1.cri\"]\nrestrict_oom_score_adj = " +
			"true\nsandbox_image = %q\n"
		return ctr(b, b.startContainerd("/usr/bin/containerd", configuration, "default"))
	}
}

// own is containerd's own Go client, in a program of the tests.
type own struct {
	bed     *bed
	address string
}

func goClient(b *bed, address string) engine { return &own{b, address} }

func (e *own) do(ctx context.Context, verb string, c container) error {
	return e.doWith(ctx, verb, c, "")
}

// doWith is do for a verb with a command in the container, or a directory.
func (e *own) doWith(ctx context.Context, verb string, c container, dir string, command ...string) error {
	request, err := json.Marshal(map[string]any{
		"Name": c.name, "Image": c.from(), "Arguments": c.command(), "Devices": c.devices,
		"ReadOnly": c.readOnly, "User": c.user, "UserNS": c.userNS, "Memory": c.memory,
		"Command": command, "Directory": dir,
	})
	if err != nil {
		return err
	}
	return e.bed.ground.do(ctx, filepath.Join(installed.Containerd, "containerd-client"), e.address, verb, string(request))
}

func (e *own) run(ctx context.Context, c container) error     { return e.do(ctx, "run", c) }
func (e *own) start(ctx context.Context, c container) error   { return e.do(ctx, "start", c) }
func (e *own) restart(ctx context.Context, c container) error { return e.do(ctx, "restart", c) }
func (e *own) remove(ctx context.Context, c container) error  { return e.do(ctx, "remove", c) }
func (e *own) pause(ctx context.Context, c container) error   { return e.do(ctx, "pause", c) }
func (e *own) unpause(ctx context.Context, c container) error { return e.do(ctx, "unpause", c) }
func (e *own) update(ctx context.Context, c container) error  { return e.do(ctx, "update", c) }

func (e *own) exec(ctx context.Context, c container, command ...string) error {
	return e.doWith(ctx, "exec", c, "", command...)
}

func (e *own) checkpoint(ctx context.Context, c container, dir string) error {
	return e.doWith(ctx, "checkpoint", c, dir)
}

// ctrEngine is containerd's own command.
type ctrEngine struct {
	bed     *bed
	command []string
}

func ctr(b *bed, address string) engine {
	b.ground.environment = append(b.ground.environment, "CONTAINERD_ADDRESS="+address)
	return &ctrEngine{b, []string{"ctr", "--address", address}}
}

func (e *ctrEngine) do(ctx context.Context, arguments ...string) error {
	return e.bed.ground.do(ctx, append(e.command[:len(e.command):len(e.command)], arguments...)...)
}

func (e *ctrEngine) arguments(c container, switches ...string) []string {
	list := append([]string{"run"}, switches...)
	for _, d := range c.devices {
		list = append(list, "--device", d)
	}
	if c.readOnly {
		list = append(list, "--read-only")
	}
	if c.user {
		list = append(list, "--user", "1000:1000")
	}
	if c.userNS {
		list = append(list, "--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536")
	}
	if c.memory > 0 {
		list = append(list, "--memory-limit", fmt.Sprint(c.memory))
	}
	if c.hostPID {
		list = append(list, "--with-ns", "pid:/proc/1/ns/pid")
	}
	if c.hostNetwork {
		list = append(list, "--net-host")
	}
	if c.profile {
		list = append(list, "--seccomp")
	}
	return append(append(list, c.from(), c.name), c.command()...)
}

func (e *ctrEngine) imports(ctx context.Context, i *image.Image, _ string) error {
	return e.do(ctx, "images", "import", i.OCI)
}

func (e *ctrEngine) run(ctx context.Context, c container) error {
	err := e.do(ctx, e.arguments(c, "--rm")...)
	if err != nil {
		// After a failed start ctr leaves the container.
		e.do(ctx, "containers", "rm", c.name) // the test checks for leftovers
	}
	return err
}

func (e *ctrEngine) start(ctx context.Context, c container) error {
	return e.do(ctx, e.arguments(c, "--detach", "--null-io")...)
}

// restart replaces the container's task.
func (e *ctrEngine) restart(ctx context.Context, c container) error {
	if err := e.end(ctx, c); err != nil {
		return err
	}
	return e.do(ctx, "tasks", "start", "--detach", "--null-io", c.name)
}

// end ends a container's task, if any.
func (e *ctrEngine) end(ctx context.Context, c container) error {
	for {
		err := e.do(ctx, "tasks", "rm", "--force", c.name)
		if err == nil || strings.Contains(err.Error(), "not found") {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (e *ctrEngine) remove(ctx context.Context, c container) error {
	if err := e.end(ctx, c); err != nil {
		return err
	}
	if err := e.do(ctx, "containers", "rm", c.name); err != nil && !strings.Contains(err.Error(), "not found") {
		return err
	}
	return nil
}

func (e *ctrEngine) exec(ctx context.Context, c container, command ...string) error {
	return e.do(ctx, append([]string{"tasks", "exec", "--exec-id", "another", c.name}, command...)...)
}

func (e *ctrEngine) pause(ctx context.Context, c container) error {
	return e.do(ctx, "tasks", "pause", c.name)
}

func (e *ctrEngine) unpause(ctx context.Context, c container) error {
	return e.do(ctx, "tasks", "resume", c.name)
}

func (e *ctrEngine) checkpoint(ctx context.Context, c container, dir string) error {
	return e.do(ctx, "tasks", "checkpoint", "--image-path", dir, c.name)
}

// criEngine runs each container in a pod, as a kubelet does.
type criEngine struct {
	bed     *bed
	address string
	// annotated requests devices by an annotation, not by the field.
	annotated bool
}

func criField(b *bed, address string) engine      { return cri(b, address, false) }
func criAnnotation(b *bed, address string) engine { return cri(b, address, true) }

func cri(b *bed, address string, annotated bool) engine {
	// The tests' client replaces crictl and reads the same files.
	bin := b.mkdir("bin")
	script := fmt.Sprintf("#!/bin/sh\nset -eu\n[ \"$1\" = run ]\nexec %s/cri-client %s run \"$2\" \"$3\"\n",
		installed.Containerd, address)
	if err := os.WriteFile(filepath.Join(bin, "crictl"), []byte(script), 0o755); err != nil {
		b.Fatal(err)
	}
	b.ground.environment = append(b.ground.environment, "PATH="+bin+":/usr/sbin:/usr/bin:/sbin:/bin")
	return &criEngine{b, address, annotated}
}

type object map[string]any

func (e *criEngine) do(ctx context.Context, verb string, c container, arguments ...string) error {
	// NODE is 2: without CNI, the pod is in the host's network.
	namespaces := object{"network": 2}
	security := object{"namespace_options": namespaces, "readonly_rootfs": c.readOnly}
	if c.user {
		security["run_as_user"], security["run_as_group"] = object{"value": 1000}, object{"value": 1000}
	}
	if c.hostPID {
		namespaces["pid"] = 2 // NODE
	}
	if c.profile {
		security["seccomp"] = object{"profile_type": 0} // RuntimeDefault
	}
	if c.userNS {
		ids := []object{{"container_id": 0, "host_id": 100000, "length": 65536}}
		namespaces["userns_options"] = object{"mode": 0, "uids": ids, "gids": ids}
	}
	config := object{
		"metadata": object{"name": c.name}, "image": object{"image": c.from()}, "command": c.command(),
		"linux": object{"security_context": security, "resources": object{"memory_limit_in_bytes": c.memory}},
	}
	if e.annotated && len(c.devices) > 0 {
		config["annotations"] = object{"cdi.k8s.io/test": strings.Join(c.devices, ",")}
	} else {
		var names []object
		for _, d := range c.devices {
			names = append(names, object{"name": d})
		}
		config["CDI_devices"] = names
	}
	pod := object{
		"metadata": object{"name": c.name, "uid": c.name, "namespace": "default"},
		"linux":    object{"security_context": object{"namespace_options": namespaces}},
	}
	files := make([]string, 2)
	for i, value := range []object{config, pod} {
		text, err := json.Marshal(value)
		if err != nil {
			return err
		}
		files[i] = filepath.Join(e.bed.Root, fmt.Sprintf("%s-%d.json", c.name, i))
		if err := os.WriteFile(files[i], text, 0o644); err != nil {
			return err
		}
	}
	command := []string{filepath.Join(installed.Containerd, "cri-client"), e.address, verb, files[0], files[1]}
	return e.bed.ground.do(ctx, append(command, arguments...)...)
}

func (e *criEngine) imports(ctx context.Context, i *image.Image, _ string) error {
	ctr := filepath.Join(installed.Containerd, "ctr")
	// --local imports the image so that the CRI of containerd 1.7 lists it.
	return e.bed.ground.do(ctx, ctr, "--address", e.address, "--namespace", "k8s.io", "images", "import", "--local", i.OCI)
}

func (e *criEngine) run(ctx context.Context, c container) error     { return e.do(ctx, "run", c) }
func (e *criEngine) start(ctx context.Context, c container) error   { return e.do(ctx, "start", c) }
func (e *criEngine) restart(ctx context.Context, c container) error { return e.do(ctx, "restart", c) }
func (e *criEngine) remove(ctx context.Context, c container) error  { return e.do(ctx, "remove", c) }
func (e *criEngine) update(ctx context.Context, c container) error  { return e.do(ctx, "update", c) }

func (e *criEngine) exec(ctx context.Context, c container, command ...string) error {
	return e.do(ctx, "exec", c, command...)
}

func (e *criEngine) checkpoint(ctx context.Context, c container, dir string) error {
	return e.do(ctx, "checkpoint", c, filepath.Join(dir, "checkpoint.tar"))
}
