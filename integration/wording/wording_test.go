package main

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestScoreOfSourceCountsCommentsAndErrors(t *testing.T) {
	for name, c := range map[string]struct {
		source string
		want   score
	}{
		"a comment over two lines": {"package x\n\n// the relay stores what clients\n// sent with it\n",
			score{words: 8, relatives: 1, pronouns: 1}},
		"two comments": {"package x\n\n// relays copy this\n\n// NICs send them all\n",
			score{words: 7, pronouns: 2}},
		"a label":           {"package x\n\nvar y int // all those\n", score{}},
		"a quoted question": {"package x\n\n// the user asks Who? and waits\n", score{words: 6}},
		"a directive":       {"package x\n\n//go:build linux && what they say\n", score{}},
		"an error": {"package x\n\nvar e = errors.New(\"it is what nobody knows\")\n",
			score{words: 5, relatives: 1, pronouns: 2}},
		// "s" of the verb counts
		"a format of an error": {"package x\n\nvar e = fmt.Errorf(\n\"they meet %s there\", s)\n",
			score{words: 4, pronouns: 1}},
		"another string":  {"package x\n\nvar e = f(\"it is what nobody knows\")\n", score{}},
		"a block comment": {"package x\n\n/* all of these words\ncount */\n", score{words: 5, pronouns: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			var s score
			s.measure("x.go", []byte(c.source))
			if diff := cmp.Diff(c.want, s, cmp.AllowUnexported(score{})); diff != "" {
				t.Errorf("measure %q (-want +got):\n%s", c.source, diff)
			}
		})
	}
}

func TestScoreOfTestFileCountsNamesWithoutForm(t *testing.T) {
	source := []byte(
		"package x\n\nfunc TestTheEndOfIt(t *testing.T) {}\nfunc TestReaderEmptyFileReturnsEOF(t *testing.T) {}\nfunc " +
			"TestMain(m *testing.M) {}\n")
	var test, other score
	test.measure("x_test.go", source)
	other.measure("x.go", source)
	if test.tests != 1 || other.tests != 0 {
		t.Errorf("got %d names in x_test.go and %d in x.go, want 1 and 0", test.tests, other.tests)
	}
}

func TestTestNameWithoutFormIsRefused(t *testing.T) {
	for _, name := range []string{"TestABIFieldOffsetsMatch", "TestACSDisabledAllowsP2P",
		"TestListenerEvictsOldestHandshake", "TestMain", "FuzzLoad", "Testify", "helper", "TestThemeOfPictureIsDark"} {
		if err := checkTestName(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"TestTheEndOfWhoOffers", "TestWhoHasToGo", "TestWhatIsReached",
		"TestAResultAsItWasSaved", "TestAGPUThatIsLost", "TestJain", "TestHelpText", "TestWhereABenchListens"} {
		if checkTestName(name) == nil {
			t.Errorf("%s passes", name)
		}
	}
}

func TestCommitSubjectWithoutFormIsRefused(t *testing.T) {
	for _, subject := range []string{
		"topo: price no link that pinned lanes alone cross",
		"config, config/paths: take both packages out of hook",
		".ci: check the subjects of commits",
		"Makefile: embed the version",
		"docs: say " + strings.Repeat("é", maxSubject-len("docs: say ")),
	} {
		if err := checkSubject(subject); err != nil {
			t.Error(err)
		}
	}
	for _, subject := range []string{
		"Guests: the end of an iWARP connection may be heard of first",
		"topo: the price of a link", "topo: pricing of links", "topo: added a price", "topo: Add a price",
		"topo add a price", "add a price", "", "a package: add a price",
		"docs: say " + strings.Repeat("a", maxSubject),
	} {
		if checkSubject(subject) == nil {
			t.Errorf("%q passes", subject)
		}
	}
}

func TestLimitExceededIsReported(t *testing.T) {
	list := map[string]allowed{"a": {relatives: 5, pronouns: 60, tests: 1}, "gone": {pronouns: 40}}
	for name, c := range map[string]struct {
		found map[string]score
		want  int // errors, beside the one about "gone"
	}{
		"at the values of the list":    {map[string]score{"a": {words: 1000, relatives: 5, pronouns: 60, tests: 1}}, 0},
		"above all values of the list": {map[string]score{"a": {words: 1000, relatives: 6, pronouns: 61, tests: 2}}, 3},
		"at the general limits":        {map[string]score{"b": {words: 1000, relatives: 2, pronouns: 30}}, 0},
		"above the general limits":     {map[string]score{"b": {words: 1000, relatives: 3, pronouns: 31, tests: 1}}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			found := maps.Clone(c.found)
			found["a"] = c.found["a"]
			if errs := check(list, found); len(errs) != c.want+1 {
				t.Errorf("check: %v; want %d errors", errs, c.want+1)
			}
		})
	}
}

func TestUpdateLowersValuesAndNeverRaises(t *testing.T) {
	list := map[string]allowed{
		"lower":  {relatives: 9, pronouns: 60, tests: 3},
		"higher": {relatives: 9, pronouns: 60, tests: 3},
		"plain":  {relatives: 9, pronouns: 60, tests: 3},
		"gone":   {relatives: 9, pronouns: 60, tests: 3},
	}
	got := lowered(list, map[string]score{
		"lower":  {words: 1000, relatives: 8, pronouns: 41, tests: 2},
		"higher": {words: 1000, relatives: 10, pronouns: 61, tests: 4},
		"plain":  {words: 1000, relatives: 1, pronouns: 30},
		"new":    {words: 1000, relatives: 10, pronouns: 61, tests: 4},
	})
	want := map[string]allowed{"lower": {8, 41, 2}, "higher": {9, 60, 3}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(allowed{})); diff != "" {
		t.Errorf("lowered (-want +got):\n%s", diff)
	}
}

func TestLimitsFileWithoutFormIsRefused(t *testing.T) {
	for _, text := range []string{"", "a 1 2 3\n", "base abc\n", "base abc 2026-11-26\na 1 2\n",
		"base abc 2026-11-26\na x 2 3\n"} {
		if _, err := parseLimits(text); err == nil {
			t.Errorf("parse %q: no error", text)
		}
	}
}

// mustGit returns the output of a git command in root, and ends the test if the command fails.
func mustGit(t *testing.T, root string, args ...string) string {
	t.Helper()
	out, err := git(root, append([]string{"-c", "user.name=a", "-c", "user.email=a@example.com"}, args...)...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// mustCommit writes the file of limits and commits the tree.
func mustCommit(t *testing.T, root string, l limits) {
	t.Helper()
	if err := l.write(root); err != nil {
		t.Fatal(err)
	}
	mustGit(t, root, "add", "-A")
	mustGit(t, root, "commit", "-q", "--allow-empty", "-m", "x: set the limits")
}

// repository makes a repository with commits of these subjects and a file of limits, and
// returns its folder and the first commit.
func repository(t *testing.T, subjects ...string) (root, first string) {
	t.Helper()
	root = t.TempDir()
	mustGit(t, root, "init", "-q")
	if err := os.MkdirAll(filepath.Join(root, filepath.Dir(limitsFile)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "x.go"), []byte("package x\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for i, subject := range subjects {
		mustGit(t, root, "commit", "-q", "--allow-empty", "-m", subject)
		if i == 0 {
			first = mustGit(t, root, "rev-parse", "HEAD")
			if err := (limits{base: first, date: "2026-01-01", values: map[string]allowed{}}).write(root); err != nil {
				t.Fatal(err)
			}
		}
	}
	return root, first
}

func TestCommitsAfterBaseAreChecked(t *testing.T) {
	root, _ := repository(t, "The first commit", "x: add a file", "x: say more")
	var out bytes.Buffer
	if err := run(&out, root, true, false); err != nil || !strings.Contains(out.String(), "2 commits") {
		t.Errorf("run: %v, %s; want 2 commits", err, &out)
	}
	root, _ = repository(t, "The first commit", "x: add a file", "Say more")
	if err := run(&out, root, true, false); err == nil || !strings.Contains(err.Error(), `"Say more"`) {
		t.Errorf("run: %v; want an error about the subject", err)
	}
}

func TestShallowCloneChecksItsOwnCommits(t *testing.T) {
	for name, c := range map[string]struct {
		subject string // of the newest commit that is not a merge
		merge   bool   // the tip is a merge of a branch with that commit
		depth   string
		count   int
		ok      bool
	}{
		"a subject with the form":    {"x: say more", false, "1", 1, true},
		"a subject without the form": {"Say more", false, "1", 1, false},
		"a merge":                    {"Say more", true, "1", 0, true},
		"a merge with two commits":   {"x: say more", true, "2", 2, true},
		"a merge of a bad subject":   {"Say more", true, "2", 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			root, _ := repository(t, "The first commit", "x: add a file")
			if c.merge {
				mustGit(t, root, "checkout", "-q", "-b", "side")
			}
			mustGit(t, root, "commit", "-q", "--allow-empty", "-m", c.subject)
			if c.merge {
				mustGit(t, root, "checkout", "-q", "-")
				mustGit(t, root, "merge", "-q", "--no-ff", "-m", "Merge branch 'side'", "side")
			}
			clone := filepath.Join(t.TempDir(), "clone")
			if out, err := exec.Command("git", "clone", "-q", "--depth", c.depth, "file://"+root,
				clone).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			l, err := readLimits(root)
			if err != nil {
				t.Fatal(err)
			}
			count, err := checkCommits(clone, l)
			if count != c.count || (err == nil) != c.ok {
				t.Errorf("%d commits, %v; want %d commits, and success %v", count, err, c.count, c.ok)
			}
		})
	}
}

func TestTreeWithoutHistoryFailsOnlyInCI(t *testing.T) {
	missing := strings.Repeat("1", 40)
	for name, change := range map[string]func(t *testing.T, root string) error{
		"an archive": func(t *testing.T, root string) error {
			return os.RemoveAll(filepath.Join(root, ".git"))
		},
		"an archive in another repository": func(t *testing.T, root string) error {
			mustGit(t, filepath.Dir(root), "init", "-q")
			return os.RemoveAll(filepath.Join(root, ".git"))
		},
		"an empty .git in another repository": func(t *testing.T, root string) error {
			mustGit(t, filepath.Dir(root), "init", "-q")
			if err := os.RemoveAll(filepath.Join(root, ".git")); err != nil {
				return err
			}
			return os.Mkdir(filepath.Join(root, ".git"), 0o755)
		},
		"a repository without the base": func(t *testing.T, root string) error {
			return limits{base: missing, date: "2026-01-01"}.write(root)
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, _ := repository(t, "The first commit", "Say more")
			if err := change(t, root); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			if err := run(&out, root, false, false); err != nil || !strings.Contains(out.String(), "not checked") {
				t.Errorf("run: %v, %q; want a notice that subjects are not checked", err, &out)
			}
			if err := run(&out, root, true, false); !errors.Is(err, errNoHistory) {
				t.Errorf("run with -history: %v; want errNoHistory", err)
			}
		})
	}
}

func TestGitFailureIsNotTakenForMissingHistory(t *testing.T) {
	for name, change := range map[string]func(root string) error{
		"a .git that is not a repository": func(root string) error {
			return os.Remove(filepath.Join(root, ".git", "HEAD"))
		},
		"a worktree whose repository moved": func(root string) error {
			if err := os.RemoveAll(filepath.Join(root, ".git")); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(root, ".git"), []byte("gitdir: /nowhere\n"), 0o644)
		},
		"a base that is no hash": func(root string) error {
			return limits{base: "no-hash", date: "2026-01-01"}.write(root)
		},
	} {
		t.Run(name, func(t *testing.T) {
			root, _ := repository(t, "The first commit")
			if err := change(root); err != nil {
				t.Fatal(err)
			}
			t.Setenv("GIT_CEILING_DIRECTORIES", filepath.Dir(root))
			if err := run(io.Discard, root, false, false); err == nil || errors.Is(err, errNoHistory) {
				t.Errorf("run: %v; want a failure of git", err)
			}
		})
	}
	t.Run("no git", func(t *testing.T) {
		root, _ := repository(t, "The first commit")
		t.Setenv("PATH", t.TempDir())
		if err := run(io.Discard, root, false, false); !errors.Is(err, exec.ErrNotFound) {
			t.Errorf("run: %v; want %v", err, exec.ErrNotFound)
		}
	})
}

func TestCheckoutOfAnyFormIsChecked(t *testing.T) {
	root, _ := repository(t, "The first commit", "Say more")
	link, tree := filepath.Join(t.TempDir(), "link"), filepath.Join(t.TempDir(), "tree")
	if err := os.Symlink(root, link); err != nil {
		t.Fatal(err)
	}
	mustGit(t, root, "worktree", "add", "-q", tree)
	check := func(t *testing.T, at string) {
		t.Helper()
		l, err := readLimits(root)
		if err != nil {
			t.Fatal(err)
		}
		if count, err := checkCommits(at, l); count != 1 || err == nil || !strings.Contains(err.Error(), `"Say more"`) {
			t.Errorf("check: %d commits, %v; want one, and an error about its subject", count, err)
		}
	}
	t.Run("a symbolic link", func(t *testing.T) { check(t, link) })
	t.Run("a worktree", func(t *testing.T) { check(t, tree) })
	t.Run("the working directory", func(t *testing.T) {
		t.Chdir(link)
		check(t, ".")
	})
	t.Run("the checkout of another user", func(t *testing.T) {
		t.Setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
		t.Setenv("GIT_CONFIG_NOSYSTEM", "1")
		t.Setenv("GIT_CONFIG_GLOBAL", os.DevNull)
		// A git before 2.35.2 accepts the checkout anyway, so the program has to pass with
		// every git.
		check(t, root)
	})
}

func TestLimitRaisedSinceEarlierCommitIsRefused(t *testing.T) {
	root, first := repository(t, "The first commit")
	for _, step := range []struct {
		pronouns float64
		refused  bool
	}{{50, false}, {40, false}, {45, true}} {
		l := limits{base: first, date: "2026-01-01", values: map[string]allowed{"x": {pronouns: step.pronouns}}}
		mustCommit(t, root, l)
		if _, err := checkCommits(root, l); (err != nil) != step.refused {
			t.Errorf("limit %.0f: %v; want refusal %v", step.pronouns, err, step.refused)
		}
	}
}

func TestLimitsWithNewNameNeedRenamedPackage(t *testing.T) {
	before := map[string]allowed{"a": {5, 50, 1}, "b": {3, 40, 0}, "c": {9, 60, 7}}
	for name, c := range map[string]struct {
		now  map[string]allowed
		want int // errors
	}{
		"no change":      {before, 0},
		"a package left": {map[string]allowed{"a": {5, 50, 1}, "b": {3, 40, 0}}, 0},
		"a new name": {map[string]allowed{"a": {5, 50, 1}, "b": {3, 40, 0}, "c": {9, 60, 7},
			"x": {40, 90, 50}}, 1},
		"a new name of low values": {map[string]allowed{"a": {5, 50, 1}, "b": {3, 40, 0}, "c": {9, 60, 7}, "x": {}}, 1},
		"a rename":                 {map[string]allowed{"x": {5, 50, 1}, "b": {3, 40, 0}, "c": {9, 60, 7}}, 0},
		"a rename with more":       {map[string]allowed{"x": {5, 50, 2}, "b": {3, 40, 0}, "c": {9, 60, 7}}, 1},
		"two names for one": {map[string]allowed{"x": {1, 31, 1}, "y": {1, 31, 1}, "b": {3, 40, 0}, "c": {9, 60, 7}},
			1},
		"three renames":             {map[string]allowed{"x": {9, 60, 7}, "y": {5, 50, 1}, "z": {3, 40, 0}}, 0},
		"three renames, order back": {map[string]allowed{"x": {3, 40, 0}, "y": {5, 50, 1}, "z": {9, 60, 7}}, 0},
		"three renames, one larger": {map[string]allowed{"x": {3, 40, 0}, "y": {6, 50, 1}, "z": {9, 60, 7}}, 1},
		"a value raised":            {map[string]allowed{"a": {5, 51, 1}, "b": {3, 40, 0}}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			if errs := risen("abc", before, c.now); len(errs) != c.want {
				t.Errorf("risen: %v; want %d errors", errs, c.want)
			}
		})
	}
}

func TestLimitsOfBaseAndCommitsCoverNewNames(t *testing.T) {
	x, y := map[string]allowed{"x": {pronouns: 50}}, map[string]allowed{"y": {pronouns: 50}}
	both := map[string]allowed{"x": {pronouns: 50}, "y": {pronouns: 50}}
	for name, c := range map[string]struct {
		base    map[string]allowed
		commits []map[string]allowed // after the base
		now     map[string]allowed   // in the working tree
		refused bool
	}{
		"a new name since the base":             {x, nil, both, true},
		"a new name in a commit":                {x, []map[string]allowed{both}, both, true},
		"a new name before the newest commit":   {x, []map[string]allowed{both, both}, both, true},
		"a rename since the base":               {x, nil, y, false},
		"a rename in a commit":                  {x, []map[string]allowed{y}, y, false},
		"a rename and back":                     {x, []map[string]allowed{y, x}, x, false},
		"a return after the package left":       {x, []map[string]allowed{nil}, x, true},
		"a return in a commit":                  {x, []map[string]allowed{nil, x}, x, true},
		"a new name after another package left": {x, []map[string]allowed{nil}, y, true},
	} {
		t.Run(name, func(t *testing.T) {
			root, first := repository(t, "The first commit")
			mustCommit(t, root, limits{base: first, date: "2026-01-01", values: c.base})
			base := mustGit(t, root, "rev-parse", "HEAD")
			for _, values := range c.commits {
				mustCommit(t, root, limits{base: base, date: "2026-01-01", values: values})
			}
			_, err := checkCommits(root, limits{base: base, date: "2026-01-01", values: c.now})
			if (err != nil) != c.refused {
				t.Errorf("check: %v; want refusal %v", err, c.refused)
			}
		})
	}
}

func TestLimitsOfMergeThatRestoresPackageAreRefused(t *testing.T) {
	root, first := repository(t, "The first commit")
	l := limits{base: first, date: "2026-01-01", values: map[string]allowed{"x": {pronouns: 50}}}
	mustCommit(t, root, l)
	mustGit(t, root, "checkout", "-q", "-b", "side")
	mustCommit(t, root, limits{base: first, date: "2026-01-01"})
	mustGit(t, root, "checkout", "-q", "-")
	if _, err := checkCommits(root, l); err != nil {
		t.Errorf("check before the merge: %v", err)
	}
	mustGit(t, root, "merge", "-q", "--no-ff", "-s", "ours", "-m", "Merge branch 'side'", "side")
	if _, err := checkCommits(root, l); err == nil {
		t.Error("check after the merge: no error")
	}
}
