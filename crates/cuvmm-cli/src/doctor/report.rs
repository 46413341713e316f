//! What was found, as one model that text and JSON are both written from.

use cuvmm::{CUresult, Call};
use serde_json::{Value, json};

/// The number of the JSON document's shape. It changes when a key that is documented changes or goes.
const FORMAT: u32 = 1;

/// How long a line of text is at most.
const LINE: usize = 120;

/// Everything that was found.
#[derive(Clone, Debug)]
pub(super) struct Report {
    pub(super) driver: &'static str,
    /// What was examined, in words.
    pub(super) subject: String,
    pub(super) sections: Vec<Section>,
}

/// The rows about one thing.
#[derive(Clone, Debug)]
pub(super) struct Section {
    pub(super) id: String,
    pub(super) title: String,
    pub(super) rows: Vec<Row>,
}

/// One answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// What it is, the same in every report.
    pub(super) id: String,
    pub(super) title: String,
    pub(super) answer: Answer,
    pub(super) detail: String,
    /// The detail for programs, where it is more than words.
    pub(super) value: Value,
    pub(super) cure: Option<String>,
    /// The calls that it took, in order.
    pub(super) calls: Vec<Call>,
}

/// What kind of answer it is.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    /// It was tried and works.
    Yes,
    /// It was tried and doesn't, or it can't be told.
    No(Culprit),
    /// It was looked up.
    Fact,
    /// It was looked up, and is likely to hurt.
    Warning,
}

/// Who said no.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Culprit {
    /// None where no call did.
    pub(super) call: Option<Call>,
    /// None where it was not asked, or where it did as told and the outcome is wrong.
    pub(super) code: Option<CUresult>,
}

/// The row of what makes virtual memory of any use, in a device's section.
pub(super) const MEMORY: &str = "memory";

/// What the sections of devices are called, before their number.
pub(super) const DEVICE: &str = "device";

impl Row {
    pub(super) fn fact(id: &str, title: &str, detail: impl Into<String>) -> Self {
        Self {
            id: id.to_owned(),
            title: title.to_owned(),
            answer: Answer::Fact,
            detail: detail.into(),
            value: Value::Null,
            cure: None,
            calls: Vec::new(),
        }
    }

    pub(super) fn warning(id: &str, title: &str, detail: impl Into<String>, cure: impl Into<String>) -> Self {
        Self { answer: Answer::Warning, cure: Some(cure.into()), ..Self::fact(id, title, detail) }
    }

    pub(super) fn no(id: &str, title: &str, culprit: Culprit, detail: impl Into<String>) -> Self {
        Self { answer: Answer::No(culprit), ..Self::fact(id, title, detail) }
    }

    pub(super) fn value(self, value: impl Into<Value>) -> Self {
        Self { value: value.into(), ..self }
    }

    pub(super) fn cure(self, cure: Option<String>) -> Self {
        Self { cure, ..self }
    }

    fn json(&self) -> Value {
        let culprit = match self.answer {
            Answer::No(culprit) => culprit,
            _ => Culprit::default(),
        };
        json!({
            "id": self.id,
            "title": self.title,
            "answer": self.answer.word(),
            "detail": self.detail,
            "value": self.value,
            "call": culprit.call.map(Call::name),
            "code": culprit.code.map(|code| code.0),
            "name": culprit.code.and_then(CUresult::known_name),
            "cure": self.cure,
            "calls": self.calls.iter().map(|call| call.name()).collect::<Vec<_>>(),
        })
    }
}

impl Answer {
    fn word(&self) -> &'static str {
        match self {
            Self::Yes => "yes",
            Self::No(_) => "no",
            Self::Fact => "fact",
            Self::Warning => "warning",
        }
    }

    /// What a person reads: a fact needs no word.
    fn mark(&self) -> &'static str {
        match self {
            Self::Fact => "",
            _ => self.word(),
        }
    }
}

impl Report {
    /// The devices' sections.
    fn devices(&self) -> impl Iterator<Item = &Section> {
        self.sections.iter().filter(|section| section.id.starts_with(DEVICE))
    }

    fn usable(&self) -> usize {
        self.devices()
            .filter(|device| device.rows.iter().any(|row| row.id == MEMORY && row.answer == Answer::Yes))
            .count()
    }

    /// Whether virtual memory can be made, mapped, granted and given back on some device.
    pub(super) fn works(&self) -> bool {
        self.usable() > 0
    }

    fn summary(&self) -> String {
        let answers = || self.sections.iter().flat_map(|section| &section.rows).map(|row| row.answer.word());
        let count = |word| answers().filter(|answer| *answer == word).count();
        let counts = format!("{} yes, {} no, {}", count("yes"), count("no"), counted(count("warning"), "warning"));
        let verdict = match self.devices().count() {
            0 => "no device could be examined".to_owned(),
            all => format!("virtual memory works on {} of {}", self.usable(), counted(all, "device")),
        };
        format!("{verdict}; {counts}")
    }

    /// The JSON document, without a line's end.
    pub(super) fn json(&self) -> String {
        let section = |section: &Section| {
            let rows: Vec<Value> = section.rows.iter().map(Row::json).collect();
            json!({ "id": section.id, "title": section.title, "rows": rows })
        };
        let document = json!({
            "format": FORMAT,
            "driver": self.driver,
            "subject": self.subject,
            "works": self.works(),
            "summary": self.summary(),
            "sections": self.sections.iter().map(section).collect::<Vec<_>>(),
        });
        format!("{document:#}")
    }

    /// The text, without the last line's end.
    pub(super) fn text(&self) -> String {
        let rows = || self.sections.iter().flat_map(|section| &section.rows);
        let indent = rows().map(|row| row.title.len()).max().unwrap_or(0);
        let mut lines = vec![format!("examined: {}", self.subject)];
        for section in &self.sections {
            lines.extend([String::new(), section.title.clone()]);
            for row in &section.rows {
                let mut head = format!("  {:<indent$}  {:<7}  ", row.title, row.answer.mark());
                let blank = " ".repeat(head.len());
                for line in wrapped(&row.detail, LINE.saturating_sub(blank.len())) {
                    lines.push(format!("{head}{line}").trim_end().to_owned());
                    head.clone_from(&blank);
                }
                let cure = row.cure.as_deref().unwrap_or_default();
                let mut head = format!("{blank}> ");
                for line in wrapped(cure, LINE.saturating_sub(head.len())) {
                    lines.push(format!("{head}{line}"));
                    head = format!("{blank}  ");
                }
            }
        }
        lines.extend([String::new(), self.summary()]);
        lines.join("\n")
    }
}

/// Lines of whole words, each at most so long where no word is longer; none for no words.
fn wrapped(text: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= most => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// So many of something, as a person reads it.
pub(super) fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

/// A size as a person reads it: in the largest unit that it is a whole number of.
pub(super) fn bytes(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let steps = (bytes.trailing_zeros() as usize / 10).min(units.len() - 1);
    if bytes == 0 { "0 bytes".to_owned() } else { format!("{} {}", bytes >> (10 * steps), units[steps]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_told_exactly() {
        for (size, told) in
            [(0, "0 bytes"), (4096, "4 KiB"), (2 << 20, "2 MiB"), (1 << 47, "128 TiB"), (5000, "5000 bytes")]
        {
            assert_eq!(bytes(size), told);
        }
    }

    #[test]
    fn lines_are_broken_between_words() {
        assert_eq!(wrapped("one two  three", 7), ["one two", "three"]);
        assert_eq!(wrapped("longer words", 3), ["longer", "words"]);
        assert_eq!(wrapped("", 3), [""; 0]);
    }

    fn report(sections: Vec<Section>) -> Report {
        Report { driver: "sim", subject: "a test".into(), sections }
    }

    fn device(ordinal: usize, answer: Answer) -> Section {
        let row = Row { answer, ..Row::fact(MEMORY, "memory", "words") };
        Section { id: format!("{DEVICE}{ordinal}"), title: String::new(), rows: vec![row] }
    }

    #[test]
    fn it_works_where_one_device_does() {
        let no = || Answer::No(Culprit::default());
        let check = |sections, works, verdict: &str| {
            let report = report(sections);
            assert_eq!(report.works(), works);
            assert!(report.summary().starts_with(verdict), "{}", report.summary());
        };
        check(vec![], false, "no device could be examined; ");
        check(vec![device(0, no())], false, "virtual memory works on 0 of 1 device; 0 yes, 1 no");
        check(
            vec![device(0, no()), device(1, Answer::Yes)],
            true,
            "virtual memory works on 1 of 2 devices; 1 yes, 1 no",
        );
        check(vec![device(0, Answer::Fact)], false, "virtual memory works on 0 of 1 device");
    }

    #[test]
    fn text_and_json_tell_the_same() {
        let culprit = Culprit { call: Some(Call::cuMemCreate), code: Some(CUresult::NOT_PERMITTED) };
        let row = Row::no("fabric", "fabric", culprit, "it failed").cure(Some("mend it".into()));
        let report = report(vec![Section { id: "a".into(), title: "A".into(), rows: vec![row] }]);
        let text = report.text();
        assert_eq!(
            text,
            "examined: a test\n\nA\n  fabric  no       it failed\n                   > mend it\n\nno device could be examined; 0 yes, 1 no, 0 warnings"
        );
        let document: Value = serde_json::from_str(&report.json()).unwrap();
        let row = &document["sections"][0]["rows"][0];
        assert_eq!((&row["call"], &row["code"]), (&json!("cuMemCreate"), &json!(800)));
        assert_eq!((&row["name"], &row["cure"]), (&json!("CUDA_ERROR_NOT_PERMITTED"), &json!("mend it")));
        assert_eq!((&document["works"], &document["summary"]), (&json!(false), &json!(report.summary())));
    }
}
