//! A sampled text through one tool parser: the first byte is its place in the table.

use primerl_render::testing::fuzz;

pub fn fuzz(data: &[u8]) {
    if let Some((parser, text)) = data.split_first() {
        fuzz::run(usize::from(*parser) % fuzz::names().count(), text);
    }
}

#[cfg(test)]
mod tests {
    use primerl_render::testing::fuzz;

    #[test]
    fn every_parser_has_a_seed() {
        let seeds = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fuzz/seeds/tool_parsers/"
        );
        for (place, name) in fuzz::names()
            .enumerate()
            .filter(|(_, name)| *name != "none")
        {
            let seed = std::fs::read(format!("{seeds}{name}")).unwrap_or_default();
            let first = seed.first().copied().map(usize::from);
            assert_eq!(
                first,
                Some(place),
                "{seeds}{name} begins with the parser's place"
            );
        }
    }
}
