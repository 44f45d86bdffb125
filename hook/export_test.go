package hook

// HoldersOf is Holders for nodes of other names.
var HoldersOf = holders
