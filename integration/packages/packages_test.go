//go:build packages

package packages

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"debug/elf"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "write the lists of files anew")

// Directories of `make packages` and of its source.
const (
	source = "../.."
	dist   = source + "/dist"
)

// names are the Debian names of the packages.
var names = []string{"peerlane", "libpeerlane", "libpeerlane-dev", "peerlane-selinux"}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// run runs a command and returns its output.
func run(t testing.TB, name string, arguments ...string) string {
	t.Helper()
	c := exec.CommandContext(t.Context(), name, arguments...)
	var errs bytes.Buffer
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s%s", strings.Join(c.Args, " "), err, out, errs.Bytes())
	}
	return string(out)
}

// deb and rpm return the path of a package for a processor, by its name in Go.
func deb(t testing.TB, dir, name, arch string) string {
	t.Helper()
	if strings.HasSuffix(name, "-dev") || strings.HasSuffix(name, "-selinux") {
		arch = "all"
	}
	return one(t, dir, name+"_*_"+arch+".deb")
}

func rpm(t testing.TB, dir, name, arch string) string {
	t.Helper()
	arch = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[arch]
	if strings.HasSuffix(name, "-dev") || strings.HasSuffix(name, "-selinux") {
		arch = "noarch"
	}
	name = strings.Replace(name, "-dev", "-devel", 1)
	return one(t, dir, name+"-[0-9]*."+arch+".rpm")
}

func one(t testing.TB, dir, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(dir, pattern))
	check(t, err)
	if len(found) != 1 {
		t.Fatalf("%s/%s is %v; `make packages` makes them", dir, pattern, found)
	}
	return found[0]
}

// unpacked returns a directory with the files of a deb.
func unpacked(t testing.TB, name, arch string) string {
	t.Helper()
	dir := t.TempDir()
	run(t, "dpkg-deb", "-x", deb(t, dist, name, arch), dir)
	return dir
}

// manPage matches a man page in a list of files: other tests know the commands.
var manPage = regexp.MustCompile(`(?m)^.*/usr/share/man/man[158]/(\S+)\.gz.*\n`)

// docPage is a document of the repository in a list of files.
var docPage = regexp.MustCompile(`(?m)^.*/usr/share/doc/peerlane/((?:[a-z]+/)?[A-Za-z-]+\.md).*\n`)

// repositoryDocuments returns the paths of all documents of the repository below docs: packages have these.
func repositoryDocuments(t *testing.T) (documents []string) {
	t.Helper()
	const docs = "../../docs"
	check(t, filepath.WalkDir(docs, func(path string, d fs.DirEntry, err error) error {
		if err == nil && filepath.Ext(path) == ".md" {
			documents = append(documents, strings.TrimPrefix(path, docs+"/"))
		}
		return err
	}))
	slices.Sort(documents)
	return documents
}

var documentLink = regexp.MustCompile(`\]\(([^)\s#:]+)[^)]*\)`)

// Links to recorded results and to sources lead only into the repository.
func TestLinksOfInstalledDocumentsLeadToInstalledDocuments(t *testing.T) {
	docs := filepath.Join(unpacked(t, "peerlane", "amd64"), "usr/share/doc/peerlane")
	count := 0
	for _, document := range repositoryDocuments(t) {
		text, err := os.ReadFile(filepath.Join(docs, document))
		check(t, err)
		for _, m := range documentLink.FindAllStringSubmatch(string(text), -1) {
			target := filepath.Join(filepath.Dir(document), m[1])
			if filepath.Ext(target) != ".md" && filepath.Ext(target) != ".svg" || strings.HasPrefix(target, "../") {
				continue
			}
			count++
			if _, err := os.Stat(filepath.Join(docs, target)); err != nil {
				t.Errorf("%s links to %s: %v", document, m[1], err)
			}
		}
	}
	if count < 100 {
		t.Errorf("%d links were found", count)
	}
}

func TestFileListsAreCurrent(t *testing.T) {
	for _, name := range names {
		for _, format := range []string{"deb", "rpm"} {
			t.Run(name+"."+format, func(t *testing.T) {
				list := listDeb
				if format == "rpm" {
					list = listRPM
				}
				got := list(t, name, "amd64")
				if other := list(t, name, "arm64"); other != got {
					t.Errorf("files of the arm64 package differ (-amd64 +arm64):\n%s", cmp.Diff(got, other))
				}
				if name == "peerlane" {
					var pages []string
					for _, m := range manPage.FindAllStringSubmatch(got, -1) {
						pages = append(pages, m[1])
					}
					for _, page := range []string{"peerlane.1", "peerlane-cdi-generate.1", "peerlane-config.toml.5",
						"peerlane-hook.8", "peerlane-relay.8", "peerlane-runtime.8"} {
						if !slices.Contains(pages, page) {
							t.Errorf("there is no man page %s; there are %v", page, pages)
						}
					}
					got = manPage.ReplaceAllString(got, "")
					var documents []string
					for _, m := range docPage.FindAllStringSubmatch(got, -1) {
						documents = append(documents, m[1])
					}
					slices.Sort(documents)
					if diff := cmp.Diff(repositoryDocuments(t), documents); diff != "" {
						t.Errorf("documents of the repository and of the package (-want +got):\n%s", diff)
					}
					got = docPage.ReplaceAllString(got, "")
				}
				path := filepath.Join("testdata", name+"."+format+".txt")
				if *update {
					check(t, os.WriteFile(path, []byte(got), 0o644))
				}
				want, err := os.ReadFile(path)
				check(t, err)
				if diff := cmp.Diff(string(want), got); diff != "" {
					t.Errorf("%s (-file +package; accept with -update):\n%s", path, diff)
				}
			})
		}
	}
}

// listDeb returns a line for each file: mode, owner, path, and target of a link.
func listDeb(t testing.TB, name, arch string) string {
	t.Helper()
	archive := tar.NewReader(strings.NewReader(run(t, "dpkg-deb", "--fsys-tarfile", deb(t, dist, name, arch))))
	var lines []string
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		check(t, err)
		line := fmt.Sprintf("%v %d:%d %s", h.FileInfo().Mode(), h.Uid, h.Gid, strings.TrimPrefix(h.Name, "."))
		if h.Linkname != "" {
			line += " -> " + h.Linkname
		}
		lines = append(lines, line+"\n")
	}
	for _, conffile := range strings.Fields(controlFile(t, deb(t, dist, name, arch), "conffiles")) {
		lines = append(lines, "conffile "+conffile+"\n")
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

// controlFile returns a file of a deb's control archive, or "".
func controlFile(t testing.TB, deb, name string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--info", deb, name).Output()
	if err != nil {
		return ""
	}
	return string(out)
}

func listRPM(t testing.TB, name, arch string) string {
	t.Helper()
	const format = `[%{FILEMODES:perms} %{FILEUSERNAME}:%{FILEGROUPNAME} %{FILENAMES} %{FILEFLAGS:fflags} %{FILELINKTOS}\n]`
	var lines []string
	for line := range strings.Lines(run(t, "rpm", "-qp", "--nosignature", "--qf", format, rpm(t, dist, name, arch))) {
		lines = append(lines, strings.Join(strings.Fields(line), " ")+"\n")
	}
	slices.Sort(lines)
	return strings.Join(lines, "")
}

var glibc = regexp.MustCompile(`^GLIBC_2\.(\d+)`)

// floor returns the newest glibc, 2.N, that a dynamic program or library needs; 0 if static, and -1
// for a file other than ELF.
func floor(t testing.TB, path string) int {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		return -1
	}
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	if errors.Is(err, elf.ErrNoSymbols) {
		return 0
	}
	check(t, err)
	newest := 0
	for _, s := range symbols {
		if m := glibc.FindStringSubmatch(s.Version); m != nil {
			n, err := strconv.Atoi(m[1])
			check(t, err)
			newest = max(newest, n)
		}
	}
	return newest
}

// Dependencies and README name the required glibc.
func TestGlibcFloorsMatchDependencies(t *testing.T) {
	readme, err := os.ReadFile(source + "/README.md")
	check(t, err)
	for _, arch := range []string{"amd64", "arm64"} {
		for name, limit := range map[string]int{"peerlane": 34, "libpeerlane": 28} {
			dir, newest, dynamic := unpacked(t, name, arch), 0, 0
			check(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.Type().IsRegular() {
					if n := floor(t, path); n > 0 {
						newest, dynamic = max(newest, n), dynamic+1
					}
				}
				return err
			}))
			// The command, its front, the relay, the simulator and the software device; the C library,
			// NCCL's plugin, NIXL's plugin and six forwarders.
			if want := map[string]int{"peerlane": 5, "libpeerlane": 9}[name]; dynamic != want {
				t.Errorf("%s of %s has %d dynamic programs and libraries, not %d", name, arch, dynamic, want)
			}
			if newest > limit {
				t.Errorf("%s of %s needs glibc 2.%d, newer than 2.%d", name, arch, newest, limit)
			}
			if depends := run(t, "dpkg-deb", "-f", deb(t, dist, name, arch),
				"Depends"); strings.TrimSpace(depends) != fmt.Sprintf("libc6 (>= 2.%d)", limit) {
				t.Errorf("%s.deb of %s depends on %s", name, arch, depends)
			}
			if requires := run(t, "rpm", "-qp", "--nosignature", "--requires",
				rpm(t, dist, name, arch)); !strings.Contains(requires, fmt.Sprintf("libc.so.6(GLIBC_2.%d)(64bit)\n", limit)) {
				t.Errorf("%s.rpm of %s requires %s", name, arch, requires)
			}
			if !strings.Contains(string(readme), fmt.Sprintf("glibc 2.%d", limit)) {
				t.Errorf("README.md does not say glibc 2.%d", limit)
			}
		}
	}
}

// bill is the part of a CycloneDX bill of materials that other tools use.
type bill struct {
	Format     string `json:"bomFormat"`
	Components []component
}

type component struct {
	Type, Name, Version, PURL string
	Hashes                    []struct{ Alg, Content string }
}

func TestBillOfMaterialsListsComponents(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		text, err := os.ReadFile(one(t, dist, "peerlane_*_"+arch+".cdx.json"))
		check(t, err)
		var b bill
		check(t, json.Unmarshal(text, &b))
		if b.Format != "CycloneDX" {
			t.Errorf("format %q", b.Format)
		}
		find := func(kind, name string) *component {
			i := slices.IndexFunc(b.Components, func(c component) bool { return c.Type == kind && c.Name == name })
			if i < 0 {
				t.Errorf("%s: there is no %s %s", arch, kind, name)
				return &component{}
			}
			return &b.Components[i]
		}
		modules := 0
		for _, name := range []string{"peerlane", "libpeerlane"} {
			dir := unpacked(t, name, arch)
			check(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if err != nil || !d.Type().IsRegular() || floor(t, path) < 0 {
					return err
				}
				content, err := os.ReadFile(path)
				check(t, err)
				file := d.Name()
				if strings.HasSuffix(path, "usr/bin/peerlane") {
					file = "front/peerlane"
				}
				c := find("file", file)
				if len(c.Hashes) != 1 || c.Hashes[0].Content != fmt.Sprintf("%x", sha256.Sum256(content)) {
					t.Errorf("%s: %s is not the file that is described: %+v", arch, path, c)
				}
				info, err := buildinfo.ReadFile(path)
				if err != nil {
					return nil // a C program
				}
				for _, m := range info.Deps {
					modules++
					if c := find("library", m.Path); c.Version != m.Version || c.PURL != "pkg:golang/"+m.Path+"@"+m.Version ||
						len(c.Hashes) != 1 {
						t.Errorf("%s: %s %s is %+v", arch, m.Path, m.Version, c)
					}
				}
				return nil
			}))
		}
		if modules < 20 {
			t.Errorf("%s: the test sees %d modules only", arch, modules)
		}
	}
}

// Another folder, umask, time zone and language give the same bytes.
func TestPackagesAreReproducible(t *testing.T) {
	copied := filepath.Join(t.TempDir(), "elsewhere")
	check(t, os.Mkdir(copied, 0o755))
	run(t, "sh", "-c", `cd "$1" && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$2"`,
		"sh", source, copied)
	first, err := filepath.Abs(dist)
	check(t, err)
	var stamped struct{ Version, Epoch, Stamp string }
	text, err := os.ReadFile(filepath.Join(first, "work", "stamp.json"))
	check(t, err)
	check(t, json.Unmarshal(text, &stamped))
	c := exec.CommandContext(t.Context(), "sh", "-c", "umask 077 && packaging/build out amd64 arm64")
	c.Dir = copied
	c.Env = append(os.Environ(), "VERSION="+stamped.Version, "SOURCE_DATE_EPOCH="+stamped.Epoch, "STAMP="+stamped.Stamp,
		"TZ=Asia/Kathmandu", "LANG=C.UTF-8")
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	compared := 0
	for _, pattern := range []string{"*.deb", "*.rpm", "*.json"} {
		made, err := filepath.Glob(filepath.Join(first, pattern))
		check(t, err)
		for _, path := range made {
			a, err := os.ReadFile(path)
			check(t, err)
			b, err := os.ReadFile(filepath.Join(copied, "out", filepath.Base(path)))
			check(t, err)
			compared++
			if !bytes.Equal(a, b) {
				t.Errorf("the second build of %s differs", filepath.Base(path))
			}
		}
	}
	if compared != 14 {
		t.Errorf("%d files were compared, not 14", compared)
	}
}
