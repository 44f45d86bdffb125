package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/peerlane/peerlane/integration/programs"
)

func TestDatabaseUnreachableIsOneSentence(t *testing.T) {
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	defer silent.Close()
	empty := httptest.NewServer(http.NotFoundHandler())
	defer empty.Close()
	closed := httptest.NewServer(http.NotFoundHandler())
	closed.Close()
	for name, test := range map[string]struct{ database, want string }{
		"one that never answers":   {silent.URL, "no answer for 100ms"},
		"a server without one":     {empty.URL, "404 Not Found"},
		"a server that is not up":  {closed.URL, "connection refused"},
		"a copy that is not there": {"file://" + t.TempDir(), "no such file"},
		"no scheme":                {"vuln", "unsupported protocol scheme"},
		"no URL":                   {"%", "invalid URL escape"},
	} {
		var out, errOut bytes.Buffer
		patience := time.Minute
		if test.database == silent.URL {
			patience = 100 * time.Millisecond
		}
		code := check(test.database, patience, nil, &out, &errOut)
		stderr := errOut.String()
		if code != 1 || !strings.Contains(stderr, test.want) || strings.Count(stderr, "\n") != 1 || out.Len() > 0 {
			t.Errorf("%s: exit status %d, %s%s", name, code, out.String(), stderr)
		}
	}
}

func TestVulnerabilityOfModuleIsFound(t *testing.T) {
	_, err := exec.LookPath("go")
	programs.MustHave(t, err)
	dir := t.TempDir()
	for name, text := range map[string]string{
		"db/index/db.json":      `{"modified":"2026-01-02T00:00:00Z"}`,
		"db/index/modules.json": `[{"path":"stdlib","vulns":[{"id":"GO-2026-9999","modified":"2026-01-02T00:00:00Z"}]}]`,
		"db/index/vulns.json":   `[{"id":"GO-2026-9999","modified":"2026-01-02T00:00:00Z"}]`,
		"db/ID/GO-2026-9999.json": `{"schema_version":"1.3.1","id":"GO-2026-9999","modified":"2026-01-02T00:00:00Z","published":"2026-01-01T00:00:00Z",
			"summary":"Invented for a test","affected":[{"package":{"name":"stdlib","ecosystem":"Go"},"ranges":[{"type":"SEMVER","events":[{"introduced":"0"}]}],
			"ecosystem_specific":{"imports":[{"path":"path","symbols":["Clean"]}]}}],"database_specific":{"url":"https://pkg.go.dev/vuln/GO-2026-9999"}}`,
		"bad/go.mod":   "module example.org/bad\n\ngo 1.24\n",
		"bad/main.go":  "package main\n\nimport \"path\"\n\nfunc main() { println(path.Clean(\"/\")) }\n",
		"good/go.mod":  "module example.org/good\n\ngo 1.24\n",
		"good/main.go": "package main\n\nfunc main() {}\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for module, want := range map[string]int{"good": 0, "bad": 3} {
		var out, errOut bytes.Buffer
		code := check("file://"+dir+"/db", time.Minute, []string{"-C", filepath.Join(dir, module), "."}, &out, &errOut)
		if code != want || strings.Contains(out.String(), "GO-2026-9999") != (want != 0) {
			t.Errorf("%s: exit status %d, want %d: %s%s", module, code, want, out.String(), errOut.String())
		}
	}
}
