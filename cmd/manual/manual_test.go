package manual

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
)

func example() *cobra.Command {
	root := &cobra.Command{Use: "tool", Short: "A tool", Long: `A tool.

.begins with a dot, and 'with' a \ in it:

  one  a word
       that goes on

  two  words - two

The end.

Exit status:
  0  success
  3  found
`, Example: "  tool --fast=1"}
	root.PersistentFlags().Bool("verbose", false, "say more")
	below := &cobra.Command{Use: "make NAME", Short: "Make | it", Run: func(*cobra.Command, []string) {}}
	below.Flags().StringP("form", "f", "table", "print in `FORM`")
	hidden := &cobra.Command{Use: "hidden", Hidden: true, Run: func(*cobra.Command, []string) {}}
	root.AddCommand(below, hidden, NewCommand())
	return root
}

func TestManualPagesEqualGolden(t *testing.T) {
	var out bytes.Buffer
	root := example()
	root.SetOut(&out)
	root.SetArgs([]string{"manual"})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	c, err := Read(&out)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"tool.1": `.TH "TOOL" "1" "" "Peerlane v1" "Peerlane"
.SH NAME
tool \- A tool
.SH SYNOPSIS
\fBtool\fR [flags]
.SH DESCRIPTION
A tool.
.PP
\&.begins with a dot, and \(aqwith\(aq a \e in it:
.PP
.RS 4
.nf
one  a word
     that goes on

two  words \- two
.fi
.RE
.PP
The end.
.SH COMMANDS
.TP
\fBtool make\fR
Make | it; see tool\-make(1)
.SH OPTIONS
.TP
\fB\-\-verbose\fR
say more
.SH EXIT STATUS
.RS 4
.nf
0  success
3  found
2  wrong command line
.fi
.RE
.SH EXAMPLES
.RS 4
.nf
tool \-\-fast=1
.fi
.RE
.SH SEE ALSO
.BR tool\-make (1)
`,
		"tool-make.1": `.TH "TOOL\-MAKE" "1" "" "Peerlane v1" "Peerlane"
.SH NAME
tool\-make \- Make | it
.SH SYNOPSIS
\fBtool make NAME\fR [flags]
.SH DESCRIPTION
Make | it
.SH OPTIONS
.TP
\fB\-f\fR, \fB\-\-form\fR \fIFORM\fR
print in FORM (default table)
.SH GLOBAL OPTIONS
.TP
\fB\-\-verbose\fR
say more
.SH EXIT STATUS
.RS 4
.nf
0  success
1  failed; standard error has operation, object, cause and remedy
2  wrong command line
.fi
.RE
.SH SEE ALSO
.BR tool (1)
`,
	}
	if diff := cmp.Diff(want, c.Pages(1, "v1")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestManualMarkdownHasVisibleCommands(t *testing.T) {
	got := Describe(example()).Markdown()
	for _, want := range []string{
		"## tool\n\nA tool.\n\n```\ntool [flags]\n```\n",
		"| [tool make](#tool-make) | Make \\| it |\n",
		"| `-f, --form FORM` | print in FORM (default table) |\n",
		"Exit status:\n\n```\n0  success\n3  found\n2  wrong command line\n```\n",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the reference lacks %q:\n%s", want, got)
		}
	}
	if strings.Contains(got, "hidden") {
		t.Errorf("the reference has a hidden command:\n%s", got)
	}
}

func TestManualFromMarkdownMakesPage(t *testing.T) {
	got := FromMarkdown(Page{Name: "tool.conf", Section: 5, Version: "v1", Brief: "a file"},
		"# Tool\n\n`tool` reads\nit, see [there](x.md).\n\n## part\n\n`part.key`, text: a `-f`.\n")
	want := `.TH "TOOL.CONF" "5" "" "Peerlane v1" "Peerlane"
.SH NAME
tool.conf \- a file
.SH DESCRIPTION
.TP
\fBtool\fR
reads it, see there.
.SS part
.TP
\fBpart.key\fR
text: a \fB\-f\fR.
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
