//! Rewrites LaTeX as plain text: `\dfrac{3}{4}` as `3/4`, `5\text{ cm}` as `5 cm`, `\left( 1, 2 \right]` as `( 1, 2 ]`.

/// Nested groups that are followed; deeper braces are ignored.
const MAX_DEPTH: usize = 32;

/// Rewrites a piece of LaTeX, or of plain text, as plain text.
///
/// Commands without a plain meaning keep their backslash, so that `\pi` is never taken for a unit.
pub(super) fn plain(latex: &str) -> String {
    let mut reader = Reader { rest: latex };
    let mut out = String::with_capacity(latex.len());
    while !reader.rest.is_empty() {
        reader.run(&mut out, 0);
    }
    out.truncate(out.trim_end().len());
    out
}

struct Reader<'a> {
    rest: &'a str,
}

impl Reader<'_> {
    fn take(&mut self) -> Option<char> {
        let next = self.rest.chars().next()?;
        self.rest = &self.rest[next.len_utf8()..];
        Some(next)
    }

    /// Rewrites up to the brace that closes the group, or to the end.
    fn run(&mut self, out: &mut String, depth: usize) {
        while let Some(next) = self.take() {
            match next {
                '}' => return,
                '{' if depth < MAX_DEPTH => self.group(out, depth),
                '\\' => self.command(out, depth),
                '^' | '_' => self.script(next, out, depth),
                '*' if self.rest.starts_with('*') => {
                    self.take();
                    out.push('^'); // Python's power
                }
                '{' | '$' | '€' | '£' => {}
                '\u{2212}' | '\u{2010}'..='\u{2014}' | '\u{fe63}' | '\u{ff0d}' => out.push('-'),
                '×' | '·' | '⋅' => out.push('*'),
                '÷' | '⁄' | '∕' => out.push('/'),
                '≈' | '∈' => out.push('='),
                'π' => out.push_str("\\pi"),
                '√' => out.push_str("\\sqrt"),
                '²' => out.push_str("^2"),
                '³' => out.push_str("^3"),
                '½' => fraction(out, "1", "2"),
                '⅓' => fraction(out, "1", "3"),
                '⅔' => fraction(out, "2", "3"),
                '¼' => fraction(out, "1", "4"),
                '¾' => fraction(out, "3", "4"),
                '~' => space(out),
                _ if next.is_whitespace() => space(out),
                _ => out.push(next),
            }
        }
    }

    /// Rewrites a group. Its braces only hold it together, unless they are the braces of a set.
    fn group(&mut self, out: &mut String, depth: usize) {
        let mut inner = String::new();
        self.run(&mut inner, depth + 1);
        if inner == "," {
            // `1{,}000` is how LaTeX writes a comma without a space.
            let digits = self.rest.bytes().take_while(u8::is_ascii_digit).count();
            if digits != 3 || !out.ends_with(|c: char| c.is_ascii_digit()) {
                out.push(',');
            }
        } else if inner.contains(',') {
            out.push('{');
            out.push_str(&inner);
            out.push('}');
        } else {
            out.push_str(&inner);
        }
    }

    /// Reads what a command applies to: a group, another command, or one character.
    fn argument(&mut self, depth: usize) -> String {
        let mut out = String::new();
        self.rest = self.rest.trim_start();
        match self.rest.chars().next() {
            Some('{') if depth < MAX_DEPTH => {
                self.take();
                self.run(&mut out, depth + 1);
            }
            Some('\\') if depth < MAX_DEPTH => {
                self.take();
                self.command(&mut out, depth + 1);
            }
            Some('{' | '}' | '\\') | None => {}
            Some(next) => {
                self.take();
                out.push(next);
            }
        }
        out.truncate(out.trim_end().len());
        out
    }

    fn script(&mut self, mark: char, out: &mut String, depth: usize) {
        if !self.rest.starts_with(['{', '\\']) {
            out.push(mark);
            return;
        }
        let script = self.argument(depth);
        match script.as_str() {
            "°" => out.push('°'),
            _ if script.chars().count() == 1 => out.extend([mark, script.chars().next().unwrap_or_default()]),
            _ => {
                out.extend([mark, '(']);
                out.push_str(&script);
                out.push(')');
            }
        }
    }

    fn command(&mut self, out: &mut String, depth: usize) {
        let len = self.rest.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (name, rest) = self.rest.split_at(len);
        self.rest = rest;
        match name {
            "" => self.symbol(out),
            "frac" | "dfrac" | "tfrac" | "cfrac" => {
                let numerator = self.argument(depth);
                let denominator = self.argument(depth);
                fraction(out, &numerator, &denominator);
            }
            "sqrt" if !self.rest.starts_with('[') => {
                let radicand = self.argument(depth);
                out.push_str("\\sqrt(");
                out.push_str(&radicand);
                out.push(')');
            }
            "text" | "textbf" | "textit" | "textrm" | "texttt" | "mathrm" | "mathbf" | "mathit" | "mathsf" | "mbox"
            | "hbox" | "operatorname" | "boxed" | "fbox" => {
                let text = self.argument(depth);
                space(out);
                out.push_str(&text);
            }
            "left" | "right" | "big" | "Big" | "bigl" | "bigr" | "Bigl" | "Bigr" | "displaystyle" | "textstyle" => {}
            "quad" | "qquad" | "thinspace" | "enspace" => space(out),
            "cdot" | "times" => out.push('*'),
            "div" => out.push('/'),
            "circ" | "degree" => out.push('°'),
            "infty" => out.push('∞'),
            "pm" => out.push('±'),
            // What stands behind these is the answer, as behind an equals sign.
            "approx" | "simeq" | "in" => out.push('='),
            "le" | "leq" => out.push('≤'),
            "ge" | "geq" => out.push('≥'),
            "ne" | "neq" => out.push('≠'),
            "cup" => out.push('∪'),
            _ => {
                out.push('\\');
                out.push_str(name);
            }
        }
    }

    /// Rewrites a backslash followed by something else than a letter.
    fn symbol(&mut self, out: &mut String) {
        match self.take() {
            None | Some('!' | '$' | '(' | ')' | '[' | ']') => {}
            Some(',' | ';' | ':' | '\\') => space(out),
            Some(blank) if blank.is_whitespace() => space(out),
            Some(escaped) => out.push(escaped),
        }
    }
}

fn space(out: &mut String) {
    if !out.is_empty() && !out.ends_with(' ') {
        out.push(' ');
    }
}

fn fraction(out: &mut String, numerator: &str, denominator: &str) {
    if out.ends_with(|c: char| c.is_ascii_digit()) {
        out.push(' '); // a mixed number
    }
    let product = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '\\');
    operand(out, numerator, numerator.chars().all(product));
    out.push('/');
    // `1/(2x)` and `1/2x` are not the same.
    let digits = denominator.chars().all(|c| c.is_ascii_digit() || c == '.');
    operand(out, denominator, digits || denominator.chars().all(|c| c.is_ascii_alphabetic() || c == '\\'));
}

fn operand(out: &mut String, text: &str, is_atom: bool) {
    let radicand = text.strip_prefix("\\sqrt(").and_then(|rest| rest.strip_suffix(')'));
    if is_atom || radicand.is_some_and(|radicand| !radicand.contains(')')) {
        out.push_str(text);
    } else {
        out.push('(');
        out.push_str(text);
        out.push(')');
    }
}
