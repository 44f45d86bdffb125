//go:build cluster

package integration

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/peerlane/peerlane/cuda"
	"github.com/peerlane/peerlane/integration/programs"
	"github.com/peerlane/peerlane/relay/libpeerlane"
	"github.com/peerlane/peerlane/relay/nccl"
	"github.com/peerlane/peerlane/relay/nixl"
)

// The harnesses call the tables of the plugins as NCCL and NIXL do, and check every byte. Their source
// is in the folders of the plugins.
const (
	harnessNCCL = "nccl"
	harnessNIXL = "nixl"
	relayFolder = "../../relay"
)

// harnesses builds the plugins and the harnesses once, and returns the directory.
func harnesses(t *testing.T) string {
	t.Helper()
	key, err := programs.Key(relayFolder+"/nccl/source/*", relayFolder+"/nccl/tests/*", relayFolder+"/nixl/source/*",
		relayFolder+"/nixl/tests/*", relayFolder+"/libpeerlane/source/*", relayFolder+"/wire/*.h")
	if err != nil {
		t.Fatal(err)
	}
	return programs.Built(t, key, "cluster", func(dir string) error {
		if err := os.Mkdir(filepath.Join(dir, harnessNIXL), 0o755); err != nil {
			return err
		}
		c, err := libpeerlane.Compiler()
		if err != nil {
			return err
		}
		cxx, err := nixl.Compiler()
		if err != nil {
			return err
		}
		if err := errors.Join(nccl.Build(dir), nixl.Build(filepath.Join(dir, harnessNIXL))); err != nil {
			return err
		}
		ofNCCL, ofNIXL := filepath.Join(dir, "nccl-sources"), filepath.Join(dir, "nixl-sources")
		if err := errors.Join(os.Mkdir(ofNCCL, 0o755), os.Mkdir(ofNIXL, 0o755)); err != nil {
			return err
		}
		if _, err := nccl.Unpack(ofNCCL); err != nil {
			return err
		}
		if _, _, err := nixl.Unpack(ofNIXL); err != nil {
			return err
		}
		out := func(sources, name string) []string {
			return []string{"-O1", "-I", sources, "-o", filepath.Join(dir, name)}
		}
		for _, compile := range [][]string{
			slices.Concat(c, out(ofNCCL, "harness-"+harnessNCCL), []string{"-std=gnu11",
				"-I", relayFolder + "/libpeerlane/examples", relayFolder + "/nccl/tests/harness.c", "-ldl"}),
			slices.Concat(cxx, out(ofNIXL, "harness-"+harnessNIXL), []string{"-std=c++17",
				relayFolder + "/nixl/tests/harness.cpp", "-ldl"}),
			slices.Concat(c, out(ofNIXL, "libnixl.so"), []string{"-shared", "-fPIC", relayFolder + "/nixl/tests/libnixl.c"}),
		} {
			if out, err := exec.Command(compile[0], compile[1:]...).CombinedOutput(); err != nil {
				return fmt.Errorf("%s: %w: %s", strings.Join(compile, " "), err, out)
			}
		}
		return nil
	})
}

// installPlugins installs the plugins and NCCL's defaults as the packages do, before the specifications are
// written. Pods find the harnesses in the directory of reports.
func (c *cluster) installPlugins() {
	c.Helper()
	built := harnesses(c.T)
	conf, err := os.ReadFile("../../packaging/etc/nccl.conf")
	if err != nil {
		c.Fatal(err)
	}
	if err := os.WriteFile(c.Layout.NCCLConf(), conf, 0o644); err != nil {
		c.Fatal(err)
	}
	for _, dir := range []string{filepath.Join(c.Layout.Libraries(), harnessNIXL), c.reports} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			c.Fatal(err)
		}
	}
	c.pluginFiles = []string{filepath.Join(built, "harness-"+harnessNCCL), filepath.Join(built, "harness-"+harnessNIXL),
		filepath.Join(built, "libnixl.so"), filepath.Join(built, nccl.Name), filepath.Join(built, harnessNIXL, nixl.Name)}
	for name, to := range map[string]string{
		nccl.Name:                             c.Layout.Libraries(),
		filepath.Join(harnessNIXL, nixl.Name): filepath.Join(c.Layout.Libraries(), harnessNIXL),
		"harness-" + harnessNCCL:              c.reports, "harness-" + harnessNIXL: c.reports, "libnixl.so": c.reports,
	} {
		to = filepath.Join(to, filepath.Base(name))
		if err := errors.Join(copyFile(filepath.Join(built, name), to), os.Chmod(to, 0o755)); err != nil {
			c.Fatal(err)
		}
	}
}

// rank is the program of a pod: rank 0 or 1 of a harness. The ranks meet by a socket in the directory of
// reports, in place of the network of the program that uses NCCL or NIXL.
func rank(harness, number string) error {
	output, err := beRank(harness, number)
	r := look(report{Output: output})
	if err != nil {
		r.Error = err.Error()
	}
	return errors.Join(err, write(reportFile(harness+"-"+number, 1), r))
}

func beRank(harness, number string) (output string, err error) {
	for _, e := range os.Environ() {
		for _, prefix := range []string{"NCCL_", "NIXL_", "UCX_", "PEERLANE_SOCKET=", "LD_LIBRARY_PATH="} {
			if strings.HasPrefix(e, prefix) {
				return "", fmt.Errorf("the pod has the variable %s", e)
			}
		}
	}
	uuid, err := firstGPU()
	if err != nil {
		return "", err
	}
	gpus := []any{uuid, ""}
	if number == "1" {
		gpus = []any{"", uuid}
	}
	var arguments string
	switch harness {
	case harnessNCCL:
		plugin, err := pluginOfNCCL()
		if err != nil {
			return "", err
		}
		arguments = fmt.Sprintf("%s|12|run|7|2|2|100000|2||%s||%s", append([]any{plugin}, gpus...)...)
	case harnessNIXL:
		// NIXL searches the directory of NIXL_PLUGIN_DIR, or its own.
		arguments = fmt.Sprintf("/usr/lib/peerlane/nixl/%s|%s/libnixl.so|vllm|7||%s||%s|4|64|4096|3",
			append([]any{nixl.Name, reportsDir}, gpus...)...)
	default:
		return "", fmt.Errorf("there is no harness %s", harness)
	}
	other, err := meet(inReports(harness+".socket"), number == "0")
	if err != nil {
		return "", err
	}
	defer other.Close()
	command := exec.Command(inReports("harness-"+harness), strings.Split(arguments, "|")...)
	command.ExtraFiles = []*os.File{other} // descriptor 3
	out, err := command.CombinedOutput()
	return string(out), err
}

// pluginOfNCCL returns the library that NCCL loads in this container: the variable NCCL_NET_PLUGIN of
// /etc/nccl.conf, as a name for the loader (NCCL 2.30, src/plugin/plugin_open.cc).
func pluginOfNCCL() (string, error) {
	const conf = "/etc/nccl.conf"
	text, err := os.ReadFile(conf)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if name, found := strings.CutPrefix(strings.TrimSpace(line), "NCCL_NET_PLUGIN="); found {
			return "libnccl-net-" + name + ".so", nil
		}
	}
	return "", fmt.Errorf("%s does not set NCCL_NET_PLUGIN: %s", conf, text)
}

// firstGPU returns the UUID of the container's first GPU.
func firstGPU() (string, error) {
	d, err := cuda.Open()
	if err != nil {
		return "", err
	}
	device, err := d.DeviceGet(0)
	if err != nil {
		return "", err
	}
	return d.DeviceUUID(device)
}

// meet returns a connection with the other rank.
func meet(path string, listens bool) (*os.File, error) {
	var conn *net.UnixConn
	if listens {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return nil, err
		}
		defer l.Close()
		if conn, err = l.AcceptUnix(); err != nil {
			return nil, err
		}
	} else {
		for conn == nil {
			var err error
			conn, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
			if errors.Is(err, fs.ErrNotExist) {
				time.Sleep(20 * time.Millisecond)
			} else if err != nil {
				return nil, err
			}
		}
	}
	defer conn.Close()
	return conn.File()
}

func TestClusterPodsUseThePluginsWithoutVariables(t *testing.T) {
	c := startCluster(t, options{plugins: true})
	c.startNVIDIA()
	c.startPlugin()
	c.untilPublished(len(c.Plan.Lanes) + 1)
	c.mustDo("kubectl", "apply", "-f", classes, "-f", "../examples")
	for _, harness := range []string{harnessNCCL, harnessNIXL} {
		var pods []*corev1.Pod
		for _, number := range []string{"0", "1"} {
			p := claiming(c.pod(harness+"-"+number, ""), "gpu-with-staged-lane")
			p.Spec.Containers[0].Command = []string{"/usr/bin/test-peerlane", "rank", harness, number}
			pods = append(pods, p)
		}
		c.create(pods...)
		for _, p := range pods {
			r := c.reportOf(p.Name)
			if r.Error != "" || strings.Count(r.Output, ": done\n") != 1 {
				t.Errorf("pod %s: %s: %s", p.Name, r.Error, r.Output)
			}
			c.mustBeUnprivileged(r)
			if len(r.GPUs) != 1 {
				t.Errorf("pod %s sees the GPUs %v", p.Name, r.GPUs)
			}
			t.Logf("pod %s: %s", p.Name, r.Output)
		}
		c.remove(pods[0].Name, pods[1].Name)
	}
}
