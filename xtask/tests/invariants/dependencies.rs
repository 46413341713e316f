//! Dependencies point one way, and each has its reason in docs/architecture.md.

use std::collections::BTreeSet;
use std::fs;

use crate::workspace::{assert_none, packages, root};

/// What each package may depend on, development aside: of our own crates, and of the libraries
/// that bind the system. Any other library needs its reason in docs/architecture.md alone.
const LAYERS: &[(&str, &[&str])] = &[
    ("cuvmm-driver", &["libloading"]),
    ("cuvmm-handles", &["cuvmm-driver"]),
    ("cuvmm-resource", &["cuvmm-handles", "cuvmm-driver"]),
    ("cuvmm-ipc", &["cuvmm-resource", "cuvmm-handles", "cuvmm-driver", "nix", "rustix"]),
    ("cuvmm", &["cuvmm-ipc", "cuvmm-resource", "cuvmm-handles", "cuvmm-driver"]),
    ("cuvmm-sim", &["cuvmm-driver", "nix", "rustix"]),
    ("cuvmm-sim-libcuda", &["cuvmm-sim", "cuvmm-driver"]),
    ("cuvmm-cli", &["cuvmm", "cuvmm-sim"]),
    (
        "cuvmm-tests",
        &[
            "cuvmm",
            "cuvmm-ipc",
            "cuvmm-resource",
            "cuvmm-handles",
            "cuvmm-driver",
            "cuvmm-sim",
            "libloading",
            "nix",
            "rustix",
        ],
    ),
    ("xtask", &[]),
];

/// Libraries that only some layers may name.
const SYSTEM: &[&str] = &["libloading", "nix", "rustix"];

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

fn is_own(name: &str) -> bool {
    LAYERS.iter().any(|(package, _)| *package == name)
}

/// The edges that [`LAYERS`] does not allow.
fn forbidden(edges: &[Edge]) -> Vec<String> {
    let is_allowed = |edge: &&Edge| {
        let row = LAYERS.iter().find(|(package, _)| *package == edge.from);
        row.is_some_and(|(_, allowed)| allowed.contains(&edge.to.as_str()))
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
    edges
        .iter()
        .filter(|edge| edge.kind == Kind::Development && is_own(&edge.to) && edge.requirement != "*")
        .map(|edge| format!("{} -> {} {}", edge.from, edge.to, edge.requirement))
        .collect()
}

/// The names of `[workspace.dependencies]`, our own aside.
fn third_party() -> BTreeSet<String> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let (_, table) = manifest.split_once("[workspace.dependencies]\n").unwrap();
    let lines = table.lines().take_while(|line| !line.starts_with('['));
    let names = lines.filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.to_owned());
    names.filter(|name| !is_own(name)).collect()
}

#[test]
fn every_package_has_a_layer() {
    let names = packages().into_iter().map(|package| package["name"].as_str().unwrap().to_owned());
    let unknown: Vec<String> = names.filter(|name| !is_own(name)).collect();
    assert_none("packages without a row in LAYERS", &unknown);
}

#[test]
fn edges_are_those_of_the_layers() {
    let edges = edges();
    assert!(edges.len() > LAYERS.len(), "cargo metadata lists {} edges", edges.len());
    assert_none("edges that the layers do not allow", &forbidden(&edges));
}

#[test]
fn a_forbidden_edge_is_caught() {
    let check = |from: &str, to: &str, kind: Kind, expect: usize| {
        let edge = Edge { from: from.into(), to: to.into(), kind, requirement: "*".into() };
        assert_eq!(forbidden(&[edge]).len(), expect, "{from} -> {to}");
    };
    check("cuvmm-handles", "cuvmm-driver", Kind::Normal, 0);
    check("cuvmm-handles", "cuvmm-resource", Kind::Normal, 1);
    check("cuvmm-handles", "nix", Kind::Normal, 1);
    check("cuvmm-handles", "cuvmm-sim", Kind::Normal, 1);
    check("cuvmm-handles", "cuvmm-sim", Kind::Development, 0);
    check("cuvmm-ipc", "libloading", Kind::Normal, 1);
    check("cuvmm-ipc", "nix", Kind::Normal, 0);
    check("cuvmm-new", "cuvmm", Kind::Normal, 1);
    check("cuvmm-new", "thiserror", Kind::Normal, 0);
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

#[test]
fn every_dependency_is_inherited_and_used() {
    let listed = third_party();
    let used: BTreeSet<String> = edges().into_iter().map(|edge| edge.to).filter(|name| !is_own(name)).collect();
    let difference = listed.symmetric_difference(&used).cloned().collect::<Vec<_>>();
    assert_none("in [workspace.dependencies] or in a package, but not in both", &difference);
}

#[test]
fn every_dependency_has_its_reason() {
    let path = root().join("docs/architecture.md");
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let section = section(&text, "Dependencies")
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
