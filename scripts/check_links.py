"Checks a built site: every link within it leads to a page and to an anchor that exist. Links to other sites are not followed."
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    "The links, and the anchors, of one page."
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs[k] for k in ("id", "name") if attrs.get(k)}
        self.links += [attrs[k] for k in ("href", "src") if attrs.get(k)]


def broken_links(site, base=""):
    "(page, link) pairs that lead nowhere; `base` is the path under which the site is served."
    pages = {p.resolve(): Page(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = path
            if url.path:
                local = unquote(url.path)
                folder = site.resolve() if local.startswith("/") else path.parent
                target = (folder / local.removeprefix(base).lstrip("/")).resolve()
                if target.is_dir():
                    target = target / "index.html"
            known = pages.get(target)
            anchor_missing = known and url.fragment and unquote(url.fragment) not in known.anchors
            if not target.exists() or anchor_missing:
                yield path.relative_to(site.resolve()), link


if __name__ == "__main__":
    site = Path(sys.argv[1])
    pages = len(list(site.rglob("*.html")))
    if not pages:
        sys.exit(f"check_links: {site} holds no page.")
    broken = list(broken_links(site, *sys.argv[2:3]))
    for page, link in broken:
        print(f"{page}: {link} leads nowhere")
    print(f"{pages} pages, {len(broken)} broken links")
    sys.exit(bool(broken))
