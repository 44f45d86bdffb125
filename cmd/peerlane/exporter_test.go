package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/peerlane/peerlane/cmd/peerlane/exporter"
	"github.com/peerlane/peerlane/cmd/terminal"
	"github.com/peerlane/peerlane/config/paths"
)

func TestExporterPrintsMetricsOnce(t *testing.T) {
	root := t.TempDir()
	aGeneration(t, root, strings.Repeat("a", 31)+"1", "trainer")
	out := peerlane(t, "exporter", "--once", "--root", root)
	for _, want := range []string{`peerlane_relays{state="ended"} 1`, `peerlane_relays{state="left"} 0`,
		"peerlane_exporter_last_scrape_error 0"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s in\n%s", want, out)
		}
	}
	for _, test := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"--once", "--listen", ":0"}, exitUsage, "--once prints and does not listen"},
		{[]string{"--web-config", filepath.Join(root, "none.yaml")}, exitFailure, "none.yaml"},
		{[]string{"--listen", "nowhere"}, exitFailure, "listen at nowhere"},
	} {
		var o, e bytes.Buffer
		if code := run(append([]string{"exporter", "--root", root}, test.args...), &o, &e); code != test.code ||
			!strings.Contains(e.String(), test.want) {
			t.Errorf("%v: exit status %d, %q", test.args, code, e.String())
		}
	}
	if host, _, err := net.SplitHostPort(exporterAddress); err != nil || !net.ParseIP(host).IsLoopback() {
		t.Errorf("default address is %s", exporterAddress)
	}
}

// ear is a log hook that captures the exporter's address and the warnings before it.
type ear struct {
	address chan string
	warned  string
}

func (*ear) Levels() []logrus.Level { return logrus.AllLevels }
func (h *ear) Fire(e *logrus.Entry) error {
	if text, ok := strings.CutPrefix(e.Message, "metrics are at the socket "); ok {
		h.address <- text
	} else if text, ok := strings.CutPrefix(e.Message, "metrics are at "); ok {
		h.address <- strings.TrimSuffix(text, "/metrics")
	} else {
		h.warned += e.Message
	}
	return nil
}

// exporting runs an exporter on a free port until the test ends.
func exporting(t *testing.T, listen, webConfig string) (address, warned string) {
	t.Helper()
	a := &app{errOut: terminal.New(io.Discard), log: logrus.New()}
	a.log.SetOutput(io.Discard)
	heard := &ear{address: make(chan string, 1)}
	a.log.AddHook(heard)
	root := t.TempDir()
	aGeneration(t, root, strings.Repeat("a", 31)+"1", "trainer")
	source := func() (exporter.Snapshot, error) { // the container is alive
		s, err := exporter.Host(paths.New(root))()
		for i := range s.Relays {
			s.Relays[i].Alive = true
		}
		return s, err
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- a.export(ctx, a.metrics(source, false), a.metrics(source, true), []string{listen}, webConfig)
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the exporter ended with %v", err)
		}
	})
	select {
	case address = <-heard.address:
	case err := <-ended:
		t.Fatal(err)
	}
	return address, heard.warned
}

func scrape(t *testing.T, client *http.Client, url, user, password string) (status int, text string) {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	if user != "" {
		request.SetBasicAuth(user, password)
	}
	answer, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, string(body)
}

func TestExporterServesMetrics(t *testing.T) {
	address, warned := exporting(t, "127.0.0.1:0", "")
	if status, text := scrape(t, http.DefaultClient, "http://"+address+"/", "", ""); status != http.StatusOK ||
		!strings.Contains(text, `<a href="/metrics">`) {
		t.Errorf("/ answers %d: %s", status, text)
	}
	if _, text := scrape(t, http.DefaultClient, "http://"+address+"/metrics", "", ""); !strings.Contains(text,
		`peerlane_build_info{commit="`) {
		t.Errorf("no peerlane_build_info in %s", text)
	}
	if status, text := scrape(t, http.DefaultClient, "http://"+address+"/metrics", "", ""); status != http.StatusOK ||
		!strings.Contains(text, "peerlane_relays{") {
		t.Errorf("status %d: %s", status, text)
	}
	if status, _ := scrape(t, http.DefaultClient, "http://"+address+"/other", "", ""); status != http.StatusNotFound {
		t.Errorf("status %d elsewhere", status)
	}
	if warned != "" {
		t.Errorf("loopback: unexpected warning: %s", warned)
	}
	if _, warned := exporting(t, "0.0.0.0:0", ""); !strings.Contains(warned, "every client that reaches") {
		t.Errorf("open address: warning %q", warned)
	}
}

// Every user of the host can connect to the loopback address; only the exporter's group can open
// the socket.
func TestExporterAsUserHidesContainerIDs(t *testing.T) {
	address, _ := exporting(t, "127.0.0.1:0", "")
	status, text := scrape(t, http.DefaultClient, "http://"+address+"/metrics", "", "")
	if status != http.StatusOK || !strings.Contains(text, `peerlane_relay_up{container="",relay="`) ||
		strings.Contains(text, "trainer") || strings.Contains(text, "generation") {
		t.Errorf("on loopback, status %d:\n%s", status, text)
	}
	path := filepath.Join(t.TempDir(), "metrics.sock")
	for range 2 { // the second start replaces the socket that a killed exporter left
		if l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}); err == nil {
			l.SetUnlinkOnClose(false)
			l.Close()
		}
		t.Run("socket", func(t *testing.T) {
			address, _ := exporting(t, unixPrefix+path, "")
			info, err := os.Stat(address)
			if err != nil || info.Mode().Perm() != 0o660 {
				t.Fatalf("%v, %v", info, err)
			}
			transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", address)
			}}
			defer transport.CloseIdleConnections()
			if _, text := scrape(t, &http.Client{Transport: transport}, "http://exporter/metrics", "",
				""); !strings.Contains(text, `container="trainer"`) {
				t.Errorf("at the socket:\n%s", text)
			}
			if _, err := listen(unixPrefix + path); !errors.Is(err, errTaken) {
				t.Errorf("a second exporter there: %v", err)
			}
		})
	}
}

func TestExporterWithSeveralTenantsIsOff(t *testing.T) {
	root := t.TempDir()
	file := filepath.Join(root, "etc/peerlane/config.toml")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]int{
		"[cdi]\ntenancy = \"multi\"\n": exitFailure, "[cdi]\ntenancy = \"single\"\n": 0,
		"[cdi]\ntenancy = \"multi\"\n[exporter]\nmulti_tenancy = true\n": 0,
	} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		for _, args := range [][]string{{"exporter", "--once", "--root", root}, {"exporter", "collect", "--root", root}} {
			var out, errOut bytes.Buffer
			if code := run(args, &out, &errOut); code != want ||
				(want != 0) != strings.Contains(errOut.String(), "exporter.multi_tenancy") {
				t.Errorf("%s%v: exit status %d, %s", text, args, code, errOut.String())
			}
		}
	}
}

func TestExporterCollectWritesSnapshot(t *testing.T) {
	root := t.TempDir()
	id := strings.Repeat("a", 31) + "1"
	aGeneration(t, root, id, "trainer")
	got := decode[exporter.Snapshot](t, "exporter", "collect", "--root", root)
	if len(got.Relays) != 1 || got.Relays[0].Container != "trainer" || got.Relays[0].Label != exporter.Label(id) ||
		got.Error != "" {
		t.Errorf("snapshot %+v", got)
	}
}

// Units whose processes accept unauthenticated peers drop all privileges that they do not use.
func TestExporterUnitsAreHardened(t *testing.T) {
	for unit, wanted := range map[string][]string{
		"peerlane-exporter.service": {
			"User=peerlane-exporter", "NoNewPrivileges=yes", "CapabilityBoundingSet=", "ProtectSystem=strict",
			"PrivateDevices=yes", "PrivateTmp=yes", "PrivateUsers=yes",
			"ProtectHome=yes", "ProtectProc=invisible", "ProtectKernelModules=yes", "ProtectKernelTunables=yes",
			"ProtectKernelLogs=yes", "ProtectControlGroups=yes", "ProtectClock=yes",
			"ProtectHostname=yes", "MemoryDenyWriteExecute=yes", "RestrictAddressFamilies=AF_UNIX AF_INET " +
				"AF_INET6", "RestrictNamespaces=yes", "RestrictSUIDSGID=yes",
			"RestrictRealtime=yes", "LockPersonality=yes", "SystemCallFilter=@system-service", "SystemCallArchitectures=native",
			"RuntimeDirectoryMode=0750",
		},
		"peerlane-exporter-collector@.service": {
			"NoNewPrivileges=yes", "PrivateNetwork=yes", "PrivateDevices=yes", "ReadOnlyPaths=/",
			"RestrictAddressFamilies=AF_UNIX", "RestrictNamespaces=yes",
			"MemoryDenyWriteExecute=yes", "SystemCallFilter=@system-service", "CapabilityBoundingSet=CAP_DAC_OVERRIDE " +
				"CAP_DAC_READ_SEARCH CAP_SYS_PTRACE",
		},
		"peerlane-exporter-collector.socket": {"SocketUser=root", "SocketGroup=peerlane-exporter", "SocketMode=0660",
			"Accept=yes"},
	} {
		lines := strings.Split(packaged(t, "systemd/"+unit), "\n")
		for _, line := range wanted {
			if !slices.Contains(lines, line) {
				t.Errorf("%s has no line %s", unit, line)
			}
		}
	}
	// Installation leaves the exporter disabled: the scripts of the packages neither enable nor
	// start it.
	for _, name := range []string{"scripts/deb-postinst", "scripts/rpm-post"} {
		for _, fault := range exporterStarts(packaged(t, name)) {
			t.Errorf("%s enables or starts the exporter: %s", name, fault)
		}
	}
	for script, want := range map[string]int{
		"units='a.socket peerlane-exporter.service'\n":                                           1,
		"systemctl enable peerlane-exporter.service\n":                                           1,
		"for unit in a.timer peerlane-exporter.service; do\n\tsystemctl start \"$unit\"\ndone\n": 1,
		"for unit in a.timer peerlane-exporter.service; do\n\thelper unmask \"$unit\"\ndone\n":   0,
		"for unit in a.timer; do\n\tsystemctl start \"$unit\"\ndone\n# not peerlane-exporter\n":  0,
	} {
		if faults := exporterStarts(script); len(faults) != want {
			t.Errorf("%q has faults %q, want %d", script, faults, want)
		}
	}
}

// exporterStarts returns the lines of a package's script that could enable or start the exporter.
func exporterStarts(script string) (faults []string) {
	const loop = "for unit in "
	starts := func(text string) bool {
		return strings.Contains(text, "exporter") &&
			(strings.Contains(text, "enable") || strings.Contains(text, "start") || strings.Contains(text, "units="))
	}
	for i, part := range strings.Split(script, loop) {
		body, rest, _ := strings.Cut(part, "done\n")
		if i == 0 {
			body, rest = "", part
		}
		if starts(body) {
			faults = append(faults, body)
		}
		for line := range strings.Lines(rest) {
			if starts(line) {
				faults = append(faults, line)
			}
		}
	}
	return faults
}

func TestExporterSpeaksTLSAndAsksForAPassword(t *testing.T) {
	dir := t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(24 * time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cert := write("cert.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate}))
	private := write("key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
	// The password is "lanes".
	config := write("web.yaml",
		fmt.Appendf(nil, "tls_server_config:\n  cert_file: %s\n  key_file: %s\nbasic_auth_users:\n  prometheus: %s\n",
			cert, private, "$2a$04$CKNySA6NdV74/EudWE0fxO0xYwIAeP65koxmn0htj9k2Kp.eV53he"))
	address, _ := exporting(t, "127.0.0.1:0", config)
	known, err := x509.ParseCertificate(certificate)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(known)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	url := "https://" + address + "/metrics"
	for _, test := range []struct {
		user, password string
		want           int
	}{{"prometheus", "lanes", http.StatusOK}, {"prometheus", "guess", http.StatusUnauthorized}, {"", "",
		http.StatusUnauthorized}} {
		if status, text := scrape(t, client, url, test.user, test.password); status != test.want {
			t.Errorf("user %q with %q: status %d, %s", test.user, test.password, status, text)
		}
	}
	if status, _ := scrape(t, http.DefaultClient, "http://"+address+"/metrics", "prometheus",
		"lanes"); status == http.StatusOK {
		t.Error("the exporter answers without TLS")
	}
}
