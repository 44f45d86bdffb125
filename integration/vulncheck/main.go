// Command vulncheck runs govulncheck, whose pinned version is a tool of go.mod, if the database can
// be reached, and prints one sentence if not:
//
//	go run ./integration/vulncheck -db https://vuln.go.dev -- -tags vm,engines ./...
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// patience is the limit for the answer of a database. govulncheck has no limit, and asks after a
// minute of work.
const patience = 20 * time.Second

func main() {
	database := flag.String("db", "https://vuln.go.dev",
		"the database of vulnerabilities, by `URL`; file:///DIR is a copy of it")
	flag.Parse()
	os.Exit(check(*database, patience, flag.Args(), os.Stdout, os.Stderr))
}

// check returns the exit status: 1 if the check did not run, and otherwise that of govulncheck,
// which is 0 without findings and 3 with findings.
func check(database string, patience time.Duration, arguments []string, out, errOut io.Writer) int {
	if err := reach(database, patience); err != nil {
		fmt.Fprintf(errOut,
			"vulncheck: nothing is checked, because the database of vulnerabilities cannot be read: %v; run it where %s can "+
				"be reached, or name a copy of it: make vulncheck DB=file:///DIR\n", err, database)
		return 1
	}
	c := exec.Command("go", append([]string{"tool", "govulncheck", "-db", database}, arguments...)...)
	c.Stdout, c.Stderr = out, errOut
	err := c.Run()
	var ended *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &ended) && ended.Exited():
		return ended.ExitCode()
	}
	fmt.Fprintf(errOut, "vulncheck: govulncheck: %v\n", err)
	return 1
}

// reach requests the first file that govulncheck reads:
// https://go.dev/doc/security/vuln/database.
func reach(database string, patience time.Duration) error {
	location, err := url.Parse(database)
	if err != nil {
		return err
	}
	if location.Scheme == "file" {
		_, err := os.Stat(filepath.Join(location.Path, "index", "modules.json"))
		return err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), patience, fmt.Errorf("no answer for %v", patience))
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet,
		strings.TrimSuffix(database, "/")+"/index/modules.json.gz", nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", request.URL, answer.Status)
	}
	return nil
}
