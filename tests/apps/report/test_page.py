from qclip.apps.report import page


def test_text_is_escaped_and_empty_definitions_are_left_out():
    html = page.page("a < b", [page.definitions([("term", "x < y & z"), ("nothing", "")])])
    assert "<title>a &lt; b</title>" in html
    assert "<dd>x &lt; y &amp; z</dd>" in html
    assert "nothing" not in html


def test_numbers_align_right_and_words_left():
    html = page.table(["n", "what"], [["12.5", "word"]])
    assert '<td class="number">12.5</td><td>word</td>' in html


def test_the_header_of_a_column_of_numbers_aligns_right_too():
    html = page.table(["n", "what", "nothing"], [["12.5", "word", ""], ["", "1", ""]])
    assert '<th scope="col" class="number">n</th><th scope="col">what</th><th scope="col">nothing</th>' in html


def test_an_image_lives_inside_the_page(tmp_path):
    picture = tmp_path / "p.png"
    picture.write_bytes(b"\x89PNG rest")
    assert page.image(picture, "a plot") == (
        '<div class="scroll picture"><img alt="a plot" src="data:image/png;base64,iVBORyByZXN0"></div>'
    )
