//! Definition files: the text of a template and, behind a zero byte, its variables as JSON. Without that byte there are none.
//!
//! No text may panic or go on for ever, rendered or taken as it is. What is rendered twice is the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use prorl_sandbox::images::{Definition, ImageBuilder};
use serde_json::Map;

fuzz_target!(|data: &[u8]| {
    let Ok(data) = str::from_utf8(data) else { return };
    let (text, variables) = data.split_once('\0').unwrap_or((data, ""));
    let variables = serde_json::from_str(variables).unwrap_or_else(|_none| Map::new());
    let definition = |name: &str| Definition::Text { name: name.to_owned(), text: text.to_owned() };

    let template = definition("fuzzed.def.j2");
    let rendered = ImageBuilder::render(&template, &variables).map_err(|refused| refused.to_string());
    let again = ImageBuilder::render(&template, &variables).map_err(|refused| refused.to_string());
    assert_eq!(rendered, again);

    let plain = ImageBuilder::render(&definition("fuzzed.def"), &Map::new()).expect("a plain text is taken as it is");
    assert_eq!(plain, text.as_bytes());
});
