"""One model at several sites: the outermost level, crossed every some steps."""
