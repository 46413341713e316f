//! Every option that the documentation has is one that some test allocates with.

use crate::workspace::{File, assert_none, files};

/// Where the options are, and the types that have them.
const OPTIONS: [(&str, &str); 2] =
    [("crates/cuvmm-resource/src/options.rs", "Options"), ("crates/cuvmm-resource/src/grow.rs", "GrowOptions")];
/// Where the values are that options can have.
const VALUES: [&str; 3] = [
    "crates/cuvmm-resource/src/kind.rs",
    "crates/cuvmm-resource/src/growth.rs",
    "crates/cuvmm-resource/src/release.rs",
];
const DOCUMENTATION: &str = "crates/cuvmm-resource/README.md";
const TESTS: &str = "crates/cuvmm-resource/tests/";

fn read(path: &str) -> String {
    files().into_iter().find(|file| file.path == path).unwrap_or_else(|| panic!("no file {path}")).text
}

/// The names of the methods that set an option of this type.
fn setters(text: &str, of: &str) -> Vec<String> {
    let body = text.lines().skip_while(|line| *line != format!("impl {of} {{")).take_while(|line| *line != "}");
    let name = |line: &str| {
        let (name, arguments) = line.strip_prefix("    pub fn ")?.split_once('(')?;
        let is_setter = arguments.starts_with("self") || arguments.starts_with("mut self");
        is_setter.then(|| name.split('<').next().unwrap_or(name).to_owned())
    };
    body.filter_map(name).collect()
}

/// The public enums of a file, with their variants, as `Enum::Variant`.
fn variants(text: &str) -> Vec<String> {
    let mut variants = Vec::new();
    let mut of = None;
    for line in text.lines() {
        let head = line.strip_prefix("pub enum ").and_then(|rest| rest.strip_suffix(" {"));
        of = if line == "}" { None } else { head.or(of) };
        let name = line.strip_prefix("    ").filter(|name| name.starts_with(|first: char| first.is_ascii_uppercase()));
        if let (Some(of), Some(name)) = (of, name) {
            let name: String = name.chars().take_while(char::is_ascii_alphanumeric).collect();
            variants.push(format!("{of}::{name}"));
        }
    }
    variants
}

/// The functions of a file: what lies between the lines that begin one.
fn functions(text: &str) -> Vec<String> {
    let mut functions = vec![String::new()];
    for line in text.lines() {
        if line.starts_with("fn ") || line.starts_with("pub(crate) fn ") {
            functions.push(String::new());
        }
        if let Some(last) = functions.last_mut() {
            last.push_str(line);
            last.push('\n');
        }
    }
    functions
}

/// Whether it makes memory.
fn allocates(text: &str) -> bool {
    [".allocate", ".grow_with(", ".grow_into_with("].iter().any(|call| text.contains(call))
}

/// The options that no test function both sets and allocates with.
fn untested(setters: &[String], tests: &[String]) -> Vec<String> {
    let is_tested = |name: &str| {
        let call = format!(".{name}(");
        tests
            .iter()
            .filter(|text| allocates(text))
            .flat_map(|text| functions(text))
            .any(|function| function.contains(&call) && allocates(&function))
    };
    setters.iter().filter(|name| !is_tested(name)).cloned().collect()
}

fn tests() -> Vec<String> {
    let is_test = |file: &File| file.path.starts_with(TESTS) && file.path.ends_with(".rs");
    files().into_iter().filter(is_test).map(|file| file.text).collect()
}

#[test]
fn every_option_has_a_test_that_allocates_with_it() {
    for (path, of) in OPTIONS {
        let setters = setters(&read(path), of);
        assert!(setters.len() > 2, "the options of {of}: {setters:?}");
        assert_none("options that no test allocates with", &untested(&setters, &tests()));
    }
}

#[test]
fn every_value_of_an_option_has_a_file_of_tests_that_allocates_with_it() {
    let tests = tests();
    let variants: Vec<String> = VALUES.iter().flat_map(|path| variants(&read(path))).collect();
    assert!(variants.len() > 20, "{variants:?}");
    let is_tested = |variant: &str| tests.iter().any(|text| text.contains(variant) && allocates(text));
    let untested: Vec<String> = variants.into_iter().filter(|variant| !is_tested(variant)).collect();
    assert_none("values of options that no test allocates with", &untested);
}

#[test]
fn every_option_is_documented() {
    let documentation = read(DOCUMENTATION);
    let setters = setters(&read(OPTIONS[0].0), OPTIONS[0].1);
    let silent: Vec<String> =
        setters.into_iter().filter(|name| !documentation.contains(&format!("`{name}`"))).collect();
    assert_none("options that the README lacks", &silent);
}

#[test]
fn an_option_without_a_test_is_caught() {
    let source = "impl Options {\n    pub fn new() -> Self {\n    pub fn one(self, x: u8) -> Self {\n    }\n\
                  \x20   pub fn two<'a>(mut self) -> Self {\n    pub fn get(&self) -> u8 {\n}\nimpl Other {\n    pub fn three(self)\n}\n";
    let setters = setters(source, "Options");
    assert_eq!(setters, ["one", "two"]);
    let check = |test: &str, expect: &[&str]| assert_eq!(untested(&setters, &[test.to_owned()]), expect, "{test}");
    check("fn a() {\n    x.one(1).two().allocate(1);\n}\n", &[]);
    check("fn a() {\n    x.one(1);\n}\nfn b() {\n    x.two().allocate_zeroed(1);\n}\n", &["one"]);
    check("fn a() {\n    x.ones(1).allocate(2);\n}\n", &["one", "two"]);
    let kinds =
        "pub enum A {\n    /// One.\n    B,\n    C(i32),\n    D {\n        x: u8,\n    },\n}\nenum E {\n    F,\n}\n";
    assert_eq!(variants(kinds), ["A::B", "A::C", "A::D"]);
}
