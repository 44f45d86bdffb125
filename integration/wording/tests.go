package main

import (
	"fmt"
	"regexp"
)

// A name of a test begins with its subject, has three words at least, and has neither a free relative
// nor a verb of speech: Test<Subject><Condition><Result>.
var (
	sentence  = regexp.MustCompile(`^Test(The|It|Who|Whoever|Whose|What|Whatever|An|How|Where|When|That|Nobody|Somebody)[A-Z0-9]|^TestA([A-Z][a-z]|GPU|NIC|CPU|QP)`)
	vague     = regexp.MustCompile(`(What|Whatever|Who|Whoever|Whose|Says?|Said|Tells?|Told)(?:[A-Z0-9]|$)`)
	nameWords = regexp.MustCompile(`[A-Z]+[0-9]*[a-z0-9]*`)
)

// checkTestName returns an error for the name of a test without the form. Names of other functions pass.
func checkTestName(name string) error {
	if len(name) < 5 || name[:4] != "Test" || name == "TestMain" || name[4] < 'A' || name[4] > 'Z' {
		return nil
	}
	if begin := sentence.FindString(name); begin != "" {
		return fmt.Errorf("test %s begins as a sentence; begin with its subject: Test<Subject><Condition><Result>", name)
	}
	if word := vague.FindStringSubmatch(name); word != nil {
		return fmt.Errorf("test %s has the word %s; name object and result: Test<Subject><Condition><Result>", name, word[1])
	}
	if words := nameWords.FindAllString(name[4:], -1); len(words) < 3 {
		return fmt.Errorf("test %s states no result; name subject, condition and result: Test<Subject><Condition><Result>",
			name)
	}
	return nil
}
