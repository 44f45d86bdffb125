package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiversion "k8s.io/apimachinery/pkg/version"
)

// apiServer serves a release, the emulated release unless empty, and the resources of
// resource.k8s.io/v1 with an HTTP status. The result is a kubeconfig file.
func apiServer(t *testing.T, release, emulated string, status int) string {
	t.Helper()
	mux := http.NewServeMux()
	answer := func(path string, status int, body any) {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(status)
			if status == http.StatusOK {
				json.NewEncoder(w).Encode(body)
			}
		})
	}
	info := apiversion.Info{GitVersion: release}
	info.EmulationMajor, info.EmulationMinor, _ = strings.Cut(emulated, ".")
	answer("/version", http.StatusOK, info)
	answer("/apis/resource.k8s.io/v1", status, metav1.APIResourceList{GroupVersion: "resource.k8s.io/v1",
		APIResources: []metav1.APIResource{{Name: "resourceslices"}}})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: "+
		"a}}]\nclusters: [{name: a, cluster: {server: %q}}]\n", server.URL)
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func discard() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func TestAutoTakesTheModeOfTheRelease(t *testing.T) {
	for _, c := range []struct {
		mode, release, emulated string
		status                  int
		want                    string
	}{
		{modeAuto, "v1.33.9", "", http.StatusNotFound, modeDevicePlugin},
		{modeAuto, "v1.33.9", "", http.StatusOK, modeDevicePlugin},
		{modeAuto, "v1.34.1", "", http.StatusOK, modeMixed},
		{modeAuto, "v1.34.1", "", http.StatusNotFound, modeDevicePlugin},
		{modeAuto, "v1.35.4-eks-1a2b3c4", "", http.StatusOK, modeMixed},
		{modeAuto, "v1.36.0", "", http.StatusOK, modeDRA},
		{modeAuto, "v1.36.0-gke.100", "", http.StatusNotFound, modeDevicePlugin},
		{modeAuto, "v1.40.0", "", http.StatusOK, modeDRA},
		{modeAuto, "v1.37.2", "1.37", http.StatusOK, modeDRA},
		{modeAuto, "v1.37.2", "1.35", http.StatusOK, modeMixed},
		{modeDRA, "v1.34.1", "", http.StatusOK, modeDRA},
		{modeMixed, "v1.37.2", "", http.StatusOK, modeMixed},
	} {
		o := options{mode: c.mode, kubeconfig: apiServer(t, c.release, c.emulated, c.status)}
		mode, client, err := o.choose(discard())
		if err != nil || mode != c.want || (client != nil) != (c.want != modeDevicePlugin) {
			t.Errorf("%+v: %s, %v, %v", c, mode, client, err)
		}
	}
}

func TestFailedDiscoveryEndsTheProgram(t *testing.T) {
	for _, status := range []int{http.StatusForbidden, http.StatusInternalServerError, http.StatusServiceUnavailable} {
		o := options{mode: modeAuto, kubeconfig: apiServer(t, "v1.36.0", "", status)}
		if mode, _, err := o.choose(discard()); err == nil {
			t.Errorf("status %d: the mode is %s without an error", status, mode)
		}
	}
}

func TestUselessValuesOfFlagsAreRefused(t *testing.T) {
	for _, flag := range []string{"--poll=0s", "--poll=-1s", "--min-publish=-1s", "--units=0", "--units=-1"} {
		for _, mode := range []string{modeDRA, modeDevicePlugin} {
			c := command()
			c.SetArgs([]string{"--mode", mode, "--root", t.TempDir(), "--kubelet-dir", t.TempDir(), flag})
			name, value, _ := strings.Cut(flag, "=")
			var refused *flagError
			if err := c.ExecuteContext(t.Context()); !errors.As(err, &refused) || refused.name != name ||
				refused.value != value {
				t.Errorf("%s with --mode %s: %v", flag, mode, err)
			}
		}
	}
}
