//! Dependencies point one way, as the table of docs/architecture.md says, and each has its reason there.

use std::collections::BTreeSet;
use std::fs;

use crate::workspace::{assert_none, packages, root};

/// Libraries that only some layers may name.
const SYSTEM: &[&str] = &["libloading", "nix", "rustix"];

/// The head of the table of docs/architecture.md that says what each package may depend on, development aside: of our
/// own crates, and of the libraries that bind the system. Any other library needs its reason there alone.
const HEAD: &[&str] = &["crate", "what it is", "may depend on"];

/// A row of that table: a package, and what it may name.
type Layer = (String, BTreeSet<String>);

/// One line of a `[dependencies]` table.
#[derive(Clone)]
struct Edge {
    from: String,
    to: String,
    kind: Kind,
    requirement: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Of the package itself or of its build script.
    Normal,
    Development,
}

fn edges() -> Vec<Edge> {
    let mut edges = Vec::new();
    for package in packages() {
        let from = package["name"].as_str().unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let development = dependency["kind"].as_str() == Some("dev");
            edges.push(Edge {
                from: from.to_owned(),
                to: dependency["name"].as_str().unwrap().to_owned(),
                kind: if development { Kind::Development } else { Kind::Normal },
                requirement: dependency["req"].as_str().unwrap().to_owned(),
            });
        }
    }
    edges
}

fn architecture() -> String {
    let path = root().join("docs/architecture.md");
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn layers() -> Vec<Layer> {
    layers_of(&architecture()).unwrap()
}

/// The rows of the table under [`HEAD`]. In its last column stand, after commas or semicolons, names, and words for
/// several: `X and below` is X with all that it may depend on of ours, `all above` the libraries in the rows above,
/// `all` the rows above and what binds the system, `none of the above` nothing.
fn layers_of(text: &str) -> Result<Vec<Layer>, String> {
    let mut rows = text.lines().map(cells).skip_while(|cells| *cells != HEAD).skip(2);
    let mut layers: Vec<Layer> = Vec::new();
    for row in rows.by_ref().take_while(|row| !row.is_empty()) {
        let [name, _, allowed] = row[..] else { return Err(format!("a row of {} cells: {row:?}", row.len())) };
        let own = |name: &str| layers.iter().find(|(layer, _)| layer == name || *layer == format!("cuvmm-{name}"));
        let mut names = BTreeSet::new();
        for part in allowed.split([',', ';']).map(str::trim) {
            if part == "none of the above" {
            } else if part == "all" || part == "all above" {
                names.extend(layers.iter().map(|(layer, _)| layer.clone()));
                names.extend(SYSTEM.iter().filter(|_| part == "all").map(|&name| name.to_owned()));
            } else if let Some((layer, below)) = part.strip_suffix(" and below").and_then(own) {
                names.insert(layer.clone());
                names.extend(below.iter().filter(|name| !SYSTEM.contains(&name.as_str())).cloned());
            } else if let Some((layer, _)) = own(part) {
                names.insert(layer.clone());
            } else if SYSTEM.contains(&part) {
                names.insert(part.to_owned());
            } else {
                return Err(format!("{name} may depend on {part:?}, which is no row above it"));
            }
        }
        layers.push((name.trim_matches('`').to_owned(), names));
    }
    if layers.is_empty() { Err("no table of layers".into()) } else { Ok(layers) }
}

/// The cells of a line of a table; none of any other line.
fn cells(line: &str) -> Vec<&str> {
    let inner = line.trim().strip_prefix('|').and_then(|line| line.strip_suffix('|'));
    inner.map(|line| line.split('|').map(str::trim).collect()).unwrap_or_default()
}

/// The names of our own packages.
fn own() -> Vec<String> {
    packages().into_iter().map(|package| package["name"].as_str().unwrap().to_owned()).collect()
}

/// The edges that the layers do not allow.
fn forbidden(layers: &[Layer], edges: &[Edge]) -> Vec<String> {
    let is_own = |name: &str| layers.iter().any(|(package, _)| package == name);
    let is_allowed = |edge: &&Edge| {
        let row = layers.iter().find(|(package, _)| *package == edge.from);
        row.is_some_and(|(_, allowed)| allowed.contains(&edge.to))
    };
    edges
        .iter()
        .filter(|edge| edge.kind == Kind::Normal)
        .filter(|edge| is_own(&edge.to) || SYSTEM.contains(&edge.to.as_str()))
        .filter(|edge| !is_allowed(edge))
        .map(|edge| format!("{} -> {}", edge.from, edge.to))
        .collect()
}

/// Development dependencies on our own crates that name a version.
fn versioned(edges: &[Edge]) -> Vec<String> {
    let own = own();
    edges
        .iter()
        .filter(|edge| edge.kind == Kind::Development && own.contains(&edge.to) && edge.requirement != "*")
        .map(|edge| format!("{} -> {} {}", edge.from, edge.to, edge.requirement))
        .collect()
}

/// The names of `[workspace.dependencies]`, our own aside.
fn third_party() -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, table) = manifest.split_once("[workspace.dependencies]\n").unwrap();
    let lines = table.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.to_owned());
    let own = own();
    names.filter(|name| !own.contains(name)).collect()
}

#[test]
fn every_package_has_a_layer() {
    let rows: BTreeSet<String> = layers().into_iter().map(|(package, _)| package).collect();
    let named: BTreeSet<String> = own().into_iter().collect();
    let difference: Vec<String> = rows.symmetric_difference(&named).cloned().collect();
    assert_none("packages without a row in docs/architecture.md, or rows without a package", &difference);
}

#[test]
fn edges_are_those_of_the_layers() {
    let (layers, edges) = (layers(), edges());
    assert!(edges.len() > layers.len(), "cargo metadata lists {} edges", edges.len());
    assert_none("edges that the layers do not allow", &forbidden(&layers, &edges));
}

#[test]
fn a_forbidden_edge_is_caught() {
    let layers = layers();
    let check = |from: &str, to: &str, kind: Kind, expect: usize| {
        let edge = Edge { from: from.into(), to: to.into(), kind, requirement: "*".into() };
        assert_eq!(forbidden(&layers, &[edge]).len(), expect, "{from} -> {to}");
    };
    check("cuvmm-handles", "cuvmm-driver", Kind::Normal, 0);
    check("cuvmm-handles", "cuvmm-resource", Kind::Normal, 1);
    check("cuvmm-handles", "libloading", Kind::Normal, 1);
    check("cuvmm-handles", "nix", Kind::Normal, 1);
    check("cuvmm-handles", "cuvmm-sim", Kind::Normal, 1);
    check("cuvmm-handles", "cuvmm-sim", Kind::Development, 0);
    check("cuvmm-ipc", "libloading", Kind::Normal, 1);
    check("cuvmm-ipc", "nix", Kind::Normal, 0);
    check("cuvmm", "nix", Kind::Normal, 1);
    check("cuvmm-new", "cuvmm", Kind::Normal, 1);
    check("cuvmm-new", "thiserror", Kind::Normal, 0);
}

#[test]
fn the_table_is_read_as_it_is_meant() {
    let rows =
        |rows: &str| layers_of(&format!("text\n\n| crate | what it is | may depend on |\n|---|---|---|\n{rows}"));
    let read = rows(
        "| `cuvmm-driver` | calls | libloading |\n\
         | `cuvmm-handles` | owners | driver |\n\
         | `cuvmm` | facade | handles and below; nix |\n\
         | `cuvmm-tests` | suites | all |\n\
         | `xtask` | tasks | none of the above |\n\n\
         | `other` | table | nothing |\n",
    );
    let expect = [
        ("cuvmm-driver", &["libloading"][..]),
        ("cuvmm-handles", &["cuvmm-driver"]),
        ("cuvmm", &["cuvmm-driver", "cuvmm-handles", "nix"]),
        ("cuvmm-tests", &["cuvmm", "cuvmm-driver", "cuvmm-handles", "libloading", "nix", "rustix"]),
        ("xtask", &[]),
    ];
    let expect = expect.map(|(name, allowed)| (name.to_owned(), allowed.iter().map(|&name| name.to_owned()).collect()));
    assert_eq!(read.unwrap(), expect);
    for wrong in ["", "| `a` | b |\n", "| `a` | b | c |\n", "| `a` | b | b |\n| `b` | c | |\n"] {
        assert!(rows(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn development_dependencies_on_own_crates_carry_no_version() {
    let edge = |requirement: &str| Edge {
        from: "cuvmm-driver".into(),
        to: "cuvmm-sim".into(),
        kind: Kind::Development,
        requirement: requirement.into(),
    };
    assert_eq!(versioned(&[edge("^0.1.0"), edge("*")]), ["cuvmm-driver -> cuvmm-sim ^0.1.0"]);
    assert_none("write these as `{ path = … }` alone", &versioned(&edges()));
}

/// What only some builds have is still in every user's lock file, unless it is optional.
#[test]
fn what_only_some_builds_have_is_optional() {
    let mut found = Vec::new();
    for package in packages() {
        for dependency in package["dependencies"].as_array().unwrap() {
            let is_conditional = dependency["kind"].is_null() && !dependency["target"].is_null();
            if is_conditional && dependency["optional"] == false {
                found.push(format!("{} -> {}", package["name"], dependency["name"]));
            }
        }
    }
    assert_none("write these with `optional = true`", &found);
}

#[test]
fn every_dependency_is_inherited_and_used() {
    let listed = third_party();
    let own = own();
    let used: BTreeSet<String> = edges().into_iter().map(|edge| edge.to).filter(|name| !own.contains(name)).collect();
    let difference = listed.symmetric_difference(&used).cloned().collect::<Vec<_>>();
    assert_none("in [workspace.dependencies] or in a package, but not in both", &difference);
}

#[test]
fn every_dependency_has_its_reason() {
    let section = section(&architecture(), "Dependencies")
        .unwrap_or_else(|| panic!("docs/architecture.md has no section \"Dependencies\""));
    let absent: Vec<String> =
        third_party().into_iter().filter(|name| !section.contains(&format!("`{name}`"))).collect();
    assert_none("docs/architecture.md gives no reason for", &absent);
}

/// The text below the heading `title`, to the next heading of its level or above.
fn section(text: &str, title: &str) -> Option<String> {
    let level = |line: &str| line.len() - line.trim_start_matches('#').len();
    let mut lines = text.lines().skip_while(|line| level(line) == 0 || line.trim_start_matches('#').trim() != title);
    let depth = level(lines.next()?);
    let body = lines.take_while(|line| level(line) == 0 || level(line) > depth);
    Some(body.collect::<Vec<_>>().join("\n"))
}

#[test]
fn sections() {
    let text = "# A\n## Dependencies\n`x`\n### Development\n`y`\n## After\n`z`\n";
    assert_eq!(section(text, "Dependencies").unwrap(), "`x`\n### Development\n`y`");
    assert_eq!(section(text, "Absent"), None);
}
